"""A local job of each kind that a user can submit, from the command line to its result. It prints no warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_jobs import CHATS, PAIRS, PROMPTS, RL, prepare
from hpc_rl.config.kinds import KINDS, offered
from tests.marks import IS_TRANSFORMERS_4

TIMEOUT_S = 1500
SAMPLED = f"data.files=prompts.jsonl {PROMPTS} rollout.name=hf rollout.n=2 data.max_prompts=8 ray.start_timeout_s=120"
RANKS = """
import torch
torch.distributed.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
print("ranks:", int(total))
"""
CLUSTER = """
import ray
ray.init(logging_level="error")
print("tasks:", sum(ray.get([ray.remote(lambda: 1).remote() for _ in range(2)])))
"""
JOBS = {
    "sft": f"{CHATS} model.lora.rank=4",
    "dpo": PAIRS,
    "rm": PAIRS,
    "distill": f"{CHATS} teacher.path=teacher",
    "ppo": f"{RL.removeprefix('ppo ')} rollout.name=hf algorithm.kl.where=reward",
    "generate": SAMPLED,
    "eval": SAMPLED,
    "select": "select.responses=responses.jsonl select.method=threshold select.threshold=0",
    "torchrun": "-- ranks.py",
    "ray": "-- python cluster.py",
}
TRAINS = ("sft", "dpo", "rm", "distill", "ppo")
PRINTS = {"torchrun": "ranks: 2", "ray": "tasks: 2"}
ROW = '{"index": 0, "prompt": "a", "messages": [{"role": "user", "content": "a"}], "response": "b", "score": 1.0}\n'
COMPLAINT = re.compile(r"warn|deprecat|leaked", re.IGNORECASE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    prepare(folder)
    (folder / "ranks.py").write_text(RANKS)
    (folder / "cluster.py").write_text(CLUSTER)
    (folder / "responses.jsonl").write_text(ROW)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind.name for kind in offered()])
def test_a_local_job_ends_well_and_prints_no_warning(folder: Path, kind: str) -> None:
    processes = 1 if kind in ("generate", "eval", "select") else 2
    command = [sys.executable, "-m", "hpc_rl.cli", "submit", kind, "--local", "--nodes", "1", "--gpus-per-node"]
    command += [str(processes), "--run-dir", str(folder / kind)]
    if kind not in ("select", *PRINTS):
        command += ["model.path=model", "trainer.device=cpu"]
    command += JOBS[kind].split()
    if kind in TRAINS:
        command += ["trainer.total_training_steps=2", "trainer.logger=[]"]
    environ = {name: value for name, value in os.environ.items() if name != "HPC_RL_QUIET"}
    job = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    output = job.stdout + job.stderr
    assert job.returncode == 0, output
    complaints = [line for line in output.splitlines() if COMPLAINT.search(line)]
    assert IS_TRANSFORMERS_4 or complaints == []  # the lowest Ray warns of its own future
    assert PRINTS.get(kind, "") in output
    assert KINDS[kind].result is None or KINDS[kind].result_in(folder / kind).exists()
