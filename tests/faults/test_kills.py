"""A run that is killed at random moments, and resumed each time, ends with the losses of an uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rl.data.arithmetic import generate
from tests.faults.outcomes import Outcome
from tests.helpers import make_tiny_model, write_chats
from tests.rl.runs.jobs import metrics

SAVES = (
    "trainer.device=cpu",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=2",
    "trainer.export=false",
    "trainer.logger=[]",
)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Options of small runs of each kind; each step is saved."""
    folder = tmp_path_factory.mktemp("kills")
    generate(folder, n_train=23, n_val=5)
    model = f"model.path={make_tiny_model(folder / 'model')}"
    sft = [f"data.train_files={write_chats(folder / 'chats.jsonl', 31)}", "data.train_batch_size=4", "optim.lr=1e-2"]
    ppo = [
        f"data.train_files={folder}/train.jsonl",
        *("data.train_batch_size=4", "data.max_prompt_length=40", "data.max_response_length=6", "rollout.n=4"),
        *("actor.mini_batch_size=8", "actor.ppo_epochs=2", "actor.optim.lr=1e-3", "critic.optim.lr=1e-3"),
        *("reward.function=format", "reward.kwargs={pattern: '.*[a-i].*'}", "reward.workers=1"),
    ]
    return {
        "sft": [model, *SAVES, *sft, "trainer.total_epochs=1", "trainer.micro_tokens=1024"],
        "ppo": [model, *SAVES, *ppo, "trainer.total_training_steps=5", "trainer.micro_tokens=256"],
    }


def kill_often(
    folder: Path,
    options: dict[str, list[str]],
    kills: dict[str, int],
    observed: Callable[[Outcome], None] | None = None,
) -> None:
    """Kill runs of these kinds so many times, and compare each of them with one that was not killed."""
    seed = time.time_ns() % 10**6
    requests = [
        {"kind": kind, "folder": str(folder / kind / name), "options": options[kind], "kills": count, "seed": seed}
        for kind in kills
        for name, count in (("whole", 0), ("killed", kills[kind]))
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.faults.kills", json.dumps(requests)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, (seed, done.stderr)
    for request, found in zip(requests, json.loads(done.stdout.splitlines()[-1]), strict=True):
        if not request["kills"]:
            continue
        kind = request["kind"]
        assert found["kills"] == request["kills"]
        for number in range(found["runs"]):
            run = folder / kind / "killed" / f"run-{number}"
            assert metrics(run) == metrics(folder / kind / "whole" / "run-0"), (seed, number)
            names = [path.name for path in (run / "checkpoints").iterdir()]
            assert len(names) == 2 and all(name.removeprefix("step-").isdigit() for name in names), (seed, names)
        if observed is not None:
            fault = f"SIGKILL at {found['kills']} random moments in {found['runs']} runs"
            observed(Outcome(fault, "sft" if kind == "sft" else "ppo", None, "", "resumed", None, losses_equal=True))


def test_killed_at_a_few_moments(tmp_path: Path, options: dict[str, list[str]]) -> None:
    kill_often(tmp_path, options, {"sft": 3, "ppo": 2})


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_killed_at_fifty_moments(
    kind: str, tmp_path: Path, options: dict[str, list[str]], observed: Callable[[Outcome], None]
) -> None:
    kill_often(tmp_path, options, {kind: 50}, observed)
