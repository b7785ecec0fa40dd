"""What a plan expected, in job.json, in the report and beside a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.planned import Expected, read_expected
from hpc_rl.tracking.recorded import read_run
from hpc_rl.tracking.summary import run_summary

EXPECTED = Expected("generation", 63.9, 76.0, 39.94, ["trainer.micro_tokens=4096"])


def run_with(tmp_path: Path, facts: dict[str, Any]) -> RunDir:
    run = RunDir(tmp_path)
    run.job.write_text(json.dumps(facts))
    record = {"step": 1, "total_steps": 2, "time": 0.0, "perf/max_memory_gb": 38.7}
    run.metrics.write_text(json.dumps(record) + "\n")
    return run


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = run_with(tmp_path, {"plan": json.loads(json.dumps(EXPECTED.as_dict()))})
    assert read_expected(run) == EXPECTED


@pytest.mark.parametrize(
    "facts", [{}, {"plan": 3}, {"plan": {**EXPECTED.as_dict(), "peak_gb": None}}, {"plan": {"phase": "load"}}]
)
def test_a_run_without_a_plan(tmp_path: Path, facts: dict[str, Any]) -> None:
    assert read_expected(run_with(tmp_path, facts)) is None


def test_the_report_has_both(tmp_path: Path) -> None:
    run = run_with(tmp_path, {"plan": EXPECTED.as_dict()})
    assert run_summary(read_run(run)).by_label["Peak memory"] == "38.7 GB (plan: 39.9 GB)"
    assert run_summary(read_run(run_with(tmp_path, {}))).by_label["Peak memory"] == "38.7 GB"


def test_a_sentence_beside_a_failure() -> None:
    assert EXPECTED.beside(71.24) == (
        "expected at most 63.9 of 76.0 usable GB, in the phase `generation`, and 39.9 GB in the training processes; "
        "the run recorded 71.2 GB; less memory: trainer.micro_tokens=4096"
    )
    assert Expected("load", 1, 2, 1, []).beside(0).endswith("; the run recorded no complete step")
