"""Actor and critic whose optimizers have moments in 8 bits (make test-torchao)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rl.runs.jobs import Runs, metrics, series, stop_after

pytest.importorskip("torchao", reason="torchao is not installed: make test-torchao")
EIGHT = ("actor.optim.moments=8bit", "critic.optim.moments=8bit")
OPTIONS = (
    *("trainer.n_gpus_per_node=2", "algorithm.advantage=gae", "algorithm.kl={where: loss, estimator: k3}"),
    *("trainer.total_training_steps=3", "actor.ppo_epochs=2"),
)


def test_actor_and_critic_learn_and_resume(run: Runs, tmp_path: Path) -> None:
    """The first step has four updates, of which the first one is exact."""
    exact, plain, stopped = tmp_path / "exact", tmp_path / "plain", tmp_path / "stopped"
    assert run(exact, *OPTIONS) == 0
    assert run(plain, *OPTIONS, *EIGHT) == 0
    for name in ("actor/grad_norm", "critic/grad_norm"):
        assert series(plain, name)[0] == pytest.approx(series(exact, name)[0], rel=1e-2)
        assert series(plain, name) != series(exact, name)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        assert run(stopped, *OPTIONS, *EIGHT, "trainer.offload=all") == 75
    (stopped / "stop").unlink()
    assert run(stopped, *OPTIONS, *EIGHT) == 0
    assert metrics(stopped) == metrics(plain)
