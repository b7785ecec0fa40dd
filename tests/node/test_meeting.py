import threading
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.node.meeting import Meeting

NODES = ("a", "b", "c")


def test_nodes_meet_over_files(tmp_path: Path) -> None:
    head, other = Meeting(tmp_path, NODES, 0), Meeting(tmp_path, NODES, 2)
    head.arrive()
    assert head.missing() == ["b", "c"]
    other.arrive()
    assert head.missing() == ["b"]
    late = threading.Timer(0.1, head.publish, ["10.0.0.1:1234"])
    late.start()
    assert other.await_address(timeout_s=10) == "10.0.0.1:1234"
    late.join()


def test_waiting_ends_with_who_is_missing(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path / "attempt-1", NODES, 1)
    with pytest.raises(UserError, match=r"node b does not see .*attempt-1, which node a made"):
        meeting.check_shared(timeout_s=0.1)
    (tmp_path / "attempt-1").mkdir()
    meeting.check_shared(timeout_s=0.1)
    with pytest.raises(UserError, match="node b waited 0 s for node a"):
        meeting.await_address(timeout_s=0.1)
