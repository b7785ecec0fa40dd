import threading
from pathlib import Path

import pytest

from hpc_rl.errors import UserError
from hpc_rl.node import rendezvous as rendezvous_module
from hpc_rl.node.rendezvous import Rendezvous, WaitMessages, interval_s

NODES = ("a", "b", "c")


def test_nodes_meet_over_files(tmp_path: Path) -> None:
    head, other = Rendezvous(tmp_path, NODES, 0), Rendezvous(tmp_path, NODES, 2)
    head.arrive()
    assert head.missing() == ["b", "c"]
    other.arrive()
    assert head.missing() == ["b"]
    late = threading.Timer(0.1, head.publish, ["10.0.0.1:1234"])
    late.start()
    assert other.await_address(timeout_s=600) == "10.0.0.1:1234"
    late.join()


def test_waiting_ends_with_who_is_missing(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path / "attempt-1", NODES, 1)
    with pytest.raises(UserError, match=r"node b does not see .*attempt-1, which node a made"):
        rendezvous.check_shared(timeout_s=0.1)
    (tmp_path / "attempt-1").mkdir()
    rendezvous.check_shared(timeout_s=0.1)
    with pytest.raises(UserError, match="node b waited 0 s for node a"):
        rendezvous.await_address(timeout_s=0.1)


def test_many_nodes_look_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [interval_s(nodes) for nodes in (1, 100, 200, 1000, 1024)] == [0.05, 0.05, 0.1, 0.5, 0.5]
    slept: list[float] = []
    monkeypatch.setattr(rendezvous_module.time, "sleep", slept.append)
    monkeypatch.setattr(rendezvous_module.time, "monotonic", lambda: sum(slept))
    with pytest.raises(UserError, match="node node1 waited 60 s"):
        Rendezvous(tmp_path, tuple(f"node{number}" for number in range(500)), 1).await_address(timeout_s=60)
    assert set(slept) == {0.25}


def test_failures_are_those_of_the_nodes(tmp_path: Path) -> None:
    head, other = Rendezvous(tmp_path / "attempt-1", NODES, 0), Rendezvous(tmp_path / "attempt-1", NODES, 2)
    assert head.failures() == {}
    head.attempt_dir.mkdir()
    other.arrive()
    assert head.failures() == {}
    other.fail(3)
    (head.attempt_dir / ".node7.failed").write_text("1")
    assert head.failures() == {2: 3}


def test_a_long_wait_shows_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([100.0, 129.0, 130.0, 159.0, 161.0])
    monkeypatch.setattr(rendezvous_module.time, "monotonic", lambda: next(seconds))
    head, progress = Rendezvous(tmp_path, NODES, 0), WaitMessages()
    head.arrive()
    for _ in range(4):
        progress.show(head.attendance)
    line = "hpc-rl: waiting for the nodes: 1 of 3 have started; nodes b, c not yet"
    assert capsys.readouterr().out == f"{line}, 30 s\n{line}, 61 s\n"
    for rank in (1, 2):
        Rendezvous(tmp_path, NODES, rank).arrive()
    assert head.attendance() == "the nodes: 3 of 3 have started"
