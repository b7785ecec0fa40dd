"""What a plan expected, in job.json, in the report and beside a failure."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.planned import Expected, read_expected
from hpc_rl.tracking.recorded import read_run
from hpc_rl.tracking.summary import run_summary

EXPECTED = Expected(
    "generation", 63.9, 76.0, 39.94, ["trainer.micro_tokens=4096"], "h100", 8, 7_000_000_000, 64, [1.25, 3.5]
)
OLDER = ("phase", "peak_gb", "usable_gb", "training_gb", "less")
"""What the first plans recorded."""


def run_with(tmp_path: Path, facts: dict[str, Any]) -> RunDir:
    run = RunDir(tmp_path)
    run.job.write_text(json.dumps(facts))
    record = {"step": 1, "total_steps": 2, "time": 0.0, "perf/max_memory_gb": 38.7, "perf/time_per_step": 2.0}
    run.metrics.write_text(json.dumps(record) + "\n")
    return run


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = run_with(tmp_path, {"plan": json.loads(json.dumps(asdict(EXPECTED)))})
    assert read_expected(run) == EXPECTED


def test_a_plan_without_times(tmp_path: Path) -> None:
    found = read_expected(run_with(tmp_path, {"plan": {name: asdict(EXPECTED)[name] for name in OLDER}}))
    assert found == Expected("generation", 63.9, 76.0, 39.94, ["trainer.micro_tokens=4096"])


@pytest.mark.parametrize(
    "facts", [{}, {"plan": 3}, {"plan": {**asdict(EXPECTED), "peak_gb": None}}, {"plan": {"phase": "load"}}]
)
def test_a_run_without_a_plan(tmp_path: Path, facts: dict[str, Any]) -> None:
    assert read_expected(run_with(tmp_path, facts)) is None


def test_the_report_has_both(tmp_path: Path) -> None:
    def shown(facts: dict[str, Any]) -> tuple[str, str]:
        labels = run_summary(read_run(run_with(tmp_path, facts))).speeds
        return labels["Peak memory"], labels["Time per step"]

    assert shown({"plan": asdict(EXPECTED)}) == ("38.7 GB (plan: 39.9 GB)", "2 s (plan: 1.25 to 3.5 s)")
    assert shown({"plan": {**asdict(EXPECTED), "step_s": [2.5, 2.5]}})[1] == "2 s (plan: 2.5 s)"
    assert shown({"plan": {**asdict(EXPECTED), "training_gb": 0, "step_s": []}}) == ("38.7 GB", "2 s")
    assert shown({}) == ("38.7 GB", "2 s")


def test_a_sentence_beside_a_failure() -> None:
    assert EXPECTED.beside(71.24) == (
        "expected at most 63.9 of 76.0 usable GB, in the phase `generation`, and 39.9 GB in the training processes; "
        "the run recorded 71.2 GB; less memory: trainer.micro_tokens=4096"
    )
    assert Expected("load", 1, 2, 1, []).beside(0).endswith("; the run recorded no complete step")
    alone = Expected("generation", 72, 76, 0, []).beside(0)
    assert alone == (
        "expected at most 72.0 of 76.0 usable GB, in the phase `generation`; the run recorded no complete step"
    )
