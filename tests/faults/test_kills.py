"""A run that is killed at random moments, and resumed each time, ends with the losses of an uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from hpc_rl.data.arithmetic import generate
from tests.faults.outcomes import Outcome
from tests.helpers import make_tiny_model, write_chats
from tests.rl.runs.jobs import metrics

SECOND_RANKS = {"sft": "model/__1_0.distcp", "ppo": "actor/__1_0.distcp"}
"""Files of a checkpoint that only the second rank reads."""
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


def execute(requests: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Return the number of kills and runs of each request; see kills.kill_runs."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.faults.kills", json.dumps(requests)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, (requests, done.stderr)
    found: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def kill_often(
    folder: Path,
    options: dict[str, list[str]],
    kills: dict[str, int],
    observed: Callable[[Outcome], None] | None = None,
) -> None:
    """Kill runs of these kinds so many times, and compare each of them with one that was not killed.

    That one starts once more, after a file that its second rank wrote was changed.
    """
    seed = time.time_ns() % 10**6
    requests = []
    for kind, count in kills.items():
        own = {"kind": kind, "options": options[kind], "seed": seed}
        requests += [{**own, "folder": str(folder / kind / "whole"), "kills": 0, "damage": SECOND_RANKS[kind]}]
        requests += [{**own, "folder": str(folder / kind / "killed"), "kills": count}]
    counts = dict(zip(kills, execute(requests)[1::2], strict=True))
    for kind, found in counts.items():
        assert found["kills"] == kills[kind]
        whole = folder / kind / "whole" / "run-0"
        is_skipped(whole, SECOND_RANKS[kind])
        for number in range(found["runs"]):
            run = folder / kind / "killed" / f"run-{number}"
            assert metrics(run) == metrics(whole), (seed, number)
            names = sorted(path.name for path in (run / "checkpoints").iterdir())
            newest = sorted(path.name for path in (whole / "checkpoints").iterdir())[-1].removesuffix(".aside")
            assert names[-1] == newest and all(name.removeprefix("step-").isdigit() for name in names), (seed, names)
            # A kill between the last save and the removal of an older checkpoint leaves one more.
            assert len(names) in (2, 3), (seed, names)
        if observed is not None:
            fault = f"SIGKILL at {found['kills']} random moments in {found['runs']} runs"
            job: Literal["sft", "ppo"] = "sft" if kind == "sft" else "ppo"
            observed(Outcome(fault, job, None, "", "resumed", None, "", losses_equal=True))


def is_skipped(run: Path, file: str) -> None:
    """Check that all ranks resumed from the checkpoint before the newest, and measured the last step again."""
    output = "".join(path.read_text() for path in (run / "attempt-2").glob("*.log"))
    assert f"{file} does not match its checksum" in output and "resuming after step" in output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "train/loss" in line or "critic/score/mean" in line]
    last = [line for line in measured if line["step"] == lines[-1]["total_steps"]]
    assert len(last) == 1
    final = sorted(path.name for path in (run / "checkpoints").iterdir())[-1]
    assert final.endswith(".aside")


@pytest.mark.long
def test_killed_at_a_few_moments(tmp_path: Path, options: dict[str, list[str]]) -> None:
    kill_often(tmp_path, options, {"sft": 3, "ppo": 2})


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_killed_at_fifty_moments(
    kind: str, tmp_path: Path, options: dict[str, list[str]], observed: Callable[[Outcome], None]
) -> None:
    kill_often(tmp_path, options, {kind: 50}, observed)
