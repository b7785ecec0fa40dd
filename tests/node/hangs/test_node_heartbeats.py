from pathlib import Path

import pytest

from hpc_rl.node.hangs.node_heartbeats import NodeHeartbeat, NodeHeartbeats, read_node_heartbeat
from hpc_rl.node.hangs.process_status import ProcessStatus

NODES = ("a", "b", "c")
SEEN = ProcessStatus("rank 1", "b", 12, 30.5, 20, "T", "optimizer", 7, in_collective=False)


def test_what_a_node_publishes_others_read(tmp_path: Path) -> None:
    assert read_node_heartbeat(tmp_path, 1) is None
    own = NodeHeartbeats(tmp_path, NODES, 1)
    own.publish(NodeHeartbeat(quiet_s=3.5))
    assert read_node_heartbeat(tmp_path, 1) == NodeHeartbeat(count=1, quiet_s=3.5)
    own.publish(NodeHeartbeat(finds_hang=True, finding="it is late", processes=(SEEN,)))
    assert read_node_heartbeat(tmp_path, 1) == NodeHeartbeat(
        count=2, finds_hang=True, finding="it is late", processes=(SEEN,)
    )
    (tmp_path / ".node1.heartbeat").write_text('{"processes": [{}]}')
    assert read_node_heartbeat(tmp_path, 1) is None


def test_node_0_watches_all_and_the_others_watch_node_0(tmp_path: Path) -> None:
    assert list(NodeHeartbeats(tmp_path, NODES, 0).watched) == [1, 2]
    assert list(NodeHeartbeats(tmp_path, NODES, 2).watched) == [0]


def test_a_node_without_new_pulses_is_lost(tmp_path: Path) -> None:
    head, b, c = (NodeHeartbeats(tmp_path, NODES, rank) for rank in range(3))
    b.publish(NodeHeartbeat())
    assert list(head.look(head.watched, 500)) == [1]  # c has not begun
    c.publish(NodeHeartbeat())
    head.look(head.watched, 60)
    assert head.lost(hang_timeout_s=60, exchange_s=1) == {}
    b.publish(NodeHeartbeat())
    head.look(head.watched, 1)
    assert head.lost(hang_timeout_s=60, exchange_s=1) == {}
    head.look(head.watched, 60)
    assert head.lost(hang_timeout_s=60, exchange_s=1) == {2: 61}
    assert head.lost(hang_timeout_s=60, exchange_s=11) == {}
    c.publish(NodeHeartbeat(has_ended=True))
    head.look(head.watched, 61)
    assert head.lost(hang_timeout_s=60, exchange_s=1) == {1: 121}


@pytest.mark.parametrize(
    ("own", "b", "c", "expected"),
    [
        (9.0, NodeHeartbeat(quiet_s=5.0), NodeHeartbeat(quiet_s=7.0), 5.0),
        (1.0, NodeHeartbeat(quiet_s=5.0), NodeHeartbeat(quiet_s=7.0), 1.0),
        (None, NodeHeartbeat(quiet_s=5.0), NodeHeartbeat(quiet_s=7.0), None),
        (9.0, NodeHeartbeat(quiet_s=5.0), NodeHeartbeat(), None),
        (9.0, NodeHeartbeat(quiet_s=5.0), NodeHeartbeat(has_ended=True), 5.0),
    ],
)
def test_the_job_is_quiet_if_all_nodes_are(
    tmp_path: Path, own: float | None, b: NodeHeartbeat, c: NodeHeartbeat, expected: float | None
) -> None:
    head = NodeHeartbeats(tmp_path, NODES, 0)
    for rank, heartbeat in ((1, b), (2, c)):
        NodeHeartbeats(tmp_path, NODES, rank).publish(heartbeat)
    head.look(head.watched, 1)
    assert head.quiet_s(own) == expected
    head.look(head.watched, 30)
    assert head.quiet_s(100.0) == (None if expected is None and own is not None else 35.0)
