"""The benchmark of many nodes, with a few."""

from __future__ import annotations

from itertools import chain

import pytest

from benchmarks import scale_meeting


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
