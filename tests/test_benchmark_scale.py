"""The benchmarks of many nodes, runs and steps, with a few of each."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import pytest

from benchmarks import scale_meeting, scale_report, scale_runs
from hpc_rl.runs import table
from hpc_rl.slurm.states import squeue_states
from hpc_rl.tracking.metrics import read_metrics


@pytest.mark.parametrize("nodes, processes", [(1024, 8), (5, 2), (3, 8)])
def test_every_node_but_the_first_is_in_one_process(nodes: int, processes: int) -> None:
    parts = scale_meeting.parts_of(nodes, processes)
    assert list(chain(*parts)) == list(range(1, nodes)) and len(parts) <= processes
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_few_nodes_meet() -> None:
    found = scale_meeting.measure(6, processes=2)
    assert list(found) == ["all_ready_s", "node_0_processor_s", "node_0_processor_per_s", "all_have_heard_s"]
    assert min(found.values()) >= 0 and found["all_ready_s"] > 0
    (row,) = scale_meeting.rows_of({"6": {**found, "node_0_processor_per_s": 0.0125, "all_ready_s": 1.25}})
    assert row[0] == "6 nodes" and row[1] == "1.2" and row[3] == "1.2 %"


def test_the_stand_in_for_squeue_prints_rows_that_are_parsed() -> None:
    states = squeue_states(scale_runs.squeue_rows(3))
    assert list(states) == ["70000", "70001", "70002"]
    assert {(state.state, state.reason) for state in states.values()} == {("PENDING", "Priority")}


def test_queued_runs_and_those_that_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_runs.make_runs(tmp_path, 6, 2)
    scale_runs.make_slurm(tmp_path, 2)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    rows, left_out = table.find_rows(str(tmp_path / "runs"))
    states = {row.status.run: row.status.state for row in rows}
    assert left_out == 0 and states.pop("run-0") == states.pop("run-1") == "PENDING"
    assert states == dict.fromkeys(("run-2", "run-3", "run-4", "run-5"), "COMPLETED")
    found = {"runs": {"wall_s": [1.0, 3.0, 2.0], "processor_s": [0.5]}}
    assert scale_runs.rows_of(found) == [["`hpc-rl runs`", "2.00", "0.50"]]


def test_the_report_of_a_few_steps(tmp_path: Path) -> None:
    found = scale_report.measure(tmp_path, 20)
    records = read_metrics(tmp_path / "runs" / "long" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 21)) and "val/loss" in records[-1]
    assert min(found.values()) > 0
    (row,) = scale_report.rows_of({"1000000": {**found, "page_bytes": 1.5e6, "memory_bytes": 2e9}})
    assert row[0] == "1,000,000 steps" and row[-2:] == ["2.00", "1.50"]
