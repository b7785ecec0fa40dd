"""Reinforcement learning of models that also read images: on text, and exported complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.marks import long
from tests.rl.runs.jobs import Runs, series
from tests.small_models.wrappers import make_wrapper
from tests.training.checkpoints.test_complete_export import KINDS, MORE, assert_complete


@pytest.mark.parametrize("kind", ["qwen3_5", *(long(kind) for kind in (*KINDS, *MORE) if kind != "qwen3_5")])
def test_grpo_agrees_with_the_engine_and_exports_the_complete_model(run: Runs, tmp_path: Path, kind: str) -> None:
    base = make_wrapper(tmp_path / "base", kind)
    options = ("algorithm.advantage=grpo", "rollout.calculate_log_probs=true", "trainer.export=true")
    assert run(tmp_path / "run", f"model.path={base}", *options) == 0
    found = series(tmp_path / "run", "training/rollout_probs_diff_max")
    assert len(found) == 2 and max(found) < 1e-5
    assert_complete(tmp_path / "run" / "model", base)
