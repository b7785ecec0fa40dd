"""The speed of earlier runs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.runs.speeds import Measured, newest_like
from hpc_rl.tracking.planned import Expected

PLAN = Expected("update", 40, 76, 40, [], gpu="h100", gpus=4, parameters=7_000_000_000, items=64, step_s=[1, 2])


def made(root: Path, name: str, age: int, plan: Expected = PLAN, kind: str = "sft", **more: Any) -> RunDir:
    """Make a run of three steps, the first of which is slow; `age` in seconds."""
    run = RunDir(root / name)
    run.path.mkdir(parents=True)
    run.job.write_text(json.dumps({"kind": kind, "plan": plan.as_dict()}))
    os.utime(run.job, (1_000_000 - age, 1_000_000 - age))
    speeds = [10.0, 8000.0, 8200.0, 7800.0]
    records = [
        {
            "step": step,
            "perf/tokens_per_s": speed,
            "perf/time_per_step": 32000 / speed,
            "perf/max_memory_gb": 38.0 + step / 10,
            **more,
        }
        for step, speed in enumerate(speeds, start=1)
    ]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_medians_without_the_first_step(tmp_path: Path) -> None:
    made(tmp_path, "a", 10)
    found = newest_like("sft", "h100", 7_000_000_000, tmp_path)
    assert found is not None
    assert (found.run, found.throughput, found.planned_gb) == ("a", 2000.0, 40.0)
    assert (found.tokens, found.peak_gb) == pytest.approx((500.0, 38.4))


def test_the_newest_run_that_is_like_it(tmp_path: Path) -> None:
    made(tmp_path, "old", 30)
    made(tmp_path, "like", 20, replace(PLAN, parameters=7_700_000_000))
    made(tmp_path, "larger", 10, replace(PLAN, parameters=7_800_000_000))
    made(tmp_path, "elsewhere", 9, replace(PLAN, gpu="a100"))
    made(tmp_path, "other", 8, kind="dpo")
    made(tmp_path, "older-version", 7, replace(PLAN, items=0))
    made(tmp_path, "no-gpus", 6, replace(PLAN, gpus=0))
    (tmp_path / "no-job").mkdir()
    just_begun = made(tmp_path, "just-begun", 1)
    just_begun.metrics.write_text(just_begun.metrics.read_text().splitlines()[0] + "\n")
    found = newest_like("sft", "h100", 7_000_000_000, tmp_path)
    assert found is not None
    assert found.run == "like"
    assert newest_like("sft", "h200", 7_000_000_000, tmp_path) is None
    assert newest_like("sft", "h100", 7_000_000_000, tmp_path / "none") is None


def test_blocks_of_generation_have_different_sizes(tmp_path: Path) -> None:
    made(tmp_path, "a", 1, **{"perf/responses_per_s": 20.0})
    found = newest_like("sft", "h100", 7_000_000_000, tmp_path)
    assert found is not None
    assert found.tokens == 400.0


def test_the_time_of_a_step() -> None:
    measured = Measured("a", throughput=2000.0, tokens=500.0, peak_gb=1.0, planned_gb=1.0)
    assert measured.step_seconds(items=64, longest=1024, gpus=8) == 2.0
    assert measured.step_seconds(items=64, longest=250, gpus=8) == 1.0
