"""Runs whose engines are servers of ours that speak SGLang's API (tests/rl/rollout/sglang/api)."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.rl.loop.async_batches import AsynchronousBatches
from hpc_rl.rl.loop.draws import Batch
from hpc_rl.tracking.metrics import read_metrics
from tests.rl.rollout.sglang.engines import SERVERS
from tests.rl.runs.jobs import TIMEOUT_S, Runs, series

SEPARATE = ("trainer.n_gpus_per_node=3", "pools.spec={train: [1], engines: [2]}", "pools.roles.rollout=engines")
LEARNING_RATE = "actor.optim.lr=1e-2"
"""Large, so that an engine with old weights differs from the trainer."""


@pytest.fixture(autouse=True)
def servers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that are exported here take precedence, so the row only has to name this one."""
    row = ENGINES["sglang"]
    variables = {"cpu": {**row.environment["cpu"], "PYTHONPATH": ""}}
    monkeypatch.setitem(ENGINES, "sglang", dataclasses.replace(row, environment=variables))
    monkeypatch.setenv("PYTHONPATH", str(SERVERS), prepend=os.pathsep)


def differences(run_dir: Path) -> list[float]:
    return series(run_dir, "training/rollout_probs_diff_max")


def test_engines_and_trainer_agree_at_every_step(run: Runs, tmp_path: Path) -> None:
    options = ["rollout.name=sglang", "rollout.calculate_log_probs=true", "algorithm=grpo", LEARNING_RATE, *SEPARATE]
    assert run(tmp_path, *options) == 0
    assert len(differences(tmp_path)) == 2 and max(differences(tmp_path)) < 1e-4
    logs = tmp_path / "attempt-1"
    for engine in range(2):
        assert (logs / f"node0-engines-engine{engine}.log").exists()
        assert "ready to roll" in (logs / f"node0-engines-engine{engine}-server.log").read_text()


@pytest.mark.long
def test_responses_continue_with_new_weights(run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the third batch wait, with one token each, until the second update."""
    draw, log = AsynchronousBatches.draw, tmp_path / "attempt-1" / "node0-engines-engine0-server.log"

    def draw_and_wait(self: AsynchronousBatches, step: int, stops: Callable[[], bool]) -> Batch | None:
        batch = draw(self, step, stops)
        deadline = time.monotonic() + TIMEOUT_S
        while step == 1 and "a response waits" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return batch

    monkeypatch.setattr(AsynchronousBatches, "draw", draw_and_wait)
    options = ["rollout.name=sglang", "rollout.staleness=1", "rollout.partial=true", "algorithm=grpo", LEARNING_RATE]
    options += ["trainer.n_gpus_per_node=2", "pools.spec={train: [1], engines: [1]}", "pools.roles.rollout=engines"]
    options += ["+rollout.engine_kwargs.holds_after=32", "trainer.total_training_steps=3"]
    assert run(tmp_path, *options) == 0
    assert max(series(tmp_path, "rollout/staleness/max")) <= 1
    assert max(series(tmp_path, "rollout/versions/mean")) > 1


@pytest.mark.long
def test_an_engine_whose_server_dies_is_replaced(run: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["rollout.name=sglang", "algorithm=grpo", "+rollout.engine_kwargs.dies_after=6", *SEPARATE]
    assert run(tmp_path, *options) == 0
    records: list[dict[str, Any]] = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert len(records) == 2 and records[-1]["rollout/repeated"] > 0
    out = capsys.readouterr().out
    assert "(its exit code was 7); another engine starts in its place" in out and "no space left on this planet" in out
