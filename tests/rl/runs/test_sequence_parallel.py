"""Runs whose ranks compute rows together have the numbers of a run in which each rank computes its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import make_tiny_model
from tests.marks import long
from tests.rl.runs.jobs import Runs, same_metrics, stop_after

SHARED = ("trainer.sequence_parallel=2", "trainer.micro_tokens=128")
"""Rows are as long as those of one rank with micro_tokens=256."""
KL = ("algorithm.kl={where: reward, coef: 0.3}",)


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (("algorithm.advantage=gae", *KL), 2),
        long(("algorithm.advantage=grpo", *KL, "trainer.sharding=hybrid"), 4),
        long(("algorithm.advantage=grpo", *KL, "model.lora.rank=4", "model.enable_gradient_checkpointing=true"), 2),
    ],
    ids=["actor, critic and reference", "two groups", "adapters"],
)
def test_the_same_metrics(run: Runs, tmp_path: Path, options: tuple[str, ...], ranks: int) -> None:
    gpus = f"trainer.n_gpus_per_node={ranks}"
    assert run(tmp_path / "alone", *options, gpus) == 0
    assert run(tmp_path / "shared", *options, gpus, *SHARED) == 0
    same_metrics(tmp_path / "shared", tmp_path / "alone", 1e-4)


def test_a_teacher(run: Runs, tmp_path: Path) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", layers=1)
    options = ("algorithm=opd", f"teacher.path={teacher}", "trainer.n_gpus_per_node=2")
    own = run.without("reward.")
    assert own(tmp_path / "alone", *options) == 0
    assert own(tmp_path / "shared", *options, *SHARED) == 0
    same_metrics(tmp_path / "shared", tmp_path / "alone", 1e-4)


def test_a_stopped_run_resumes_without_it(run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("algorithm.advantage=gae", "trainer.n_gpus_per_node=2")
    assert run(tmp_path / "whole", *options) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert run(tmp_path / "parts", *options, *SHARED) == 75
    (tmp_path / "parts" / "stop").unlink()
    assert run(tmp_path / "parts", *options) == 0
    same_metrics(tmp_path / "parts", tmp_path / "whole", 1e-4)
