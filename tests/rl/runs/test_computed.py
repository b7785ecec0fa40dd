"""Columns that are computed during generation are those that are computed after it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.rl.loop import setup
from hpc_rl.rl.loop.computed import Computation
from hpc_rl.rl.workers.group import WorkerGroup
from tests.marks import long
from tests.rl.runs.jobs import Runs, metrics

SEPARATE = (
    *("pools.spec={train: [2], engines: [1]}", "pools.roles.rollout=engines", "trainer.n_gpus_per_node=3"),
    *("algorithm.advantage=gae", "algorithm.kl={where: loss, estimator: k3}", "rollout.n=3"),
    "rollout.calculate_log_probs=true",
    *("data.train_batch_size=8", "actor.mini_batch_size=8"),  # a mini-batch ends within a group
)


@pytest.mark.parametrize("options", [long(()), ("actor.shuffle=true",)])
def test_every_metric_is_equal_bit_for_bit(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    early: Counter[str] = Counter()
    column_of = WorkerGroup.column_of

    def counted(self: WorkerGroup, method: str, *rest: Any) -> Any:
        early[method] += 1
        return column_of(self, method, *rest)

    monkeypatch.setattr(WorkerGroup, "column_of", counted)
    assert run(tmp_path / "early", *SEPARATE, *options) == 0
    assert early == dict.fromkeys(("logprobs", "ref_logprobs", "values"), 2 * 3)
    late = lambda *rest, is_early, **named: Computation(*rest, is_early=False, **named)  # noqa: E731
    monkeypatch.setattr(setup, "Computation", late)
    assert run(tmp_path / "late", *SEPARATE, *options) == 0
    assert metrics(tmp_path / "late") == metrics(tmp_path / "early") and early.total() == 18
