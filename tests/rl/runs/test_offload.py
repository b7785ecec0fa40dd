"""Models that wait in host memory while others compute: the same numbers, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rl.runs.jobs import Runs, metrics, stop_after

OPTIONS = (
    *("trainer.n_gpus_per_node=3", "pools={spec: {train: [2], engines: [1]}, roles: {rollout: engines}}"),
    *("algorithm.advantage=gae", "algorithm.kl={where: loss, estimator: k3}", "rollout.calculate_log_probs=true"),
    *("trainer.total_training_steps=3", "actor.ppo_epochs=2"),
)


def test_every_metric_is_equal_and_a_run_resumes(run: Runs, tmp_path: Path) -> None:
    plain, away, stopped = tmp_path / "plain", tmp_path / "away", tmp_path / "stopped"
    assert run(plain, *OPTIONS) == 0
    assert run(away, *OPTIONS, "trainer.offload=all") == 0
    assert metrics(away) == metrics(plain)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        assert run(stopped, *OPTIONS, "trainer.offload=all", "trainer.save_async=false") == 75
    (stopped / "stop").unlink()
    assert run(stopped, *OPTIONS, "trainer.offload=optimizer") == 0
    assert metrics(stopped) == metrics(plain)
