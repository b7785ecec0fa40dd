"""What node 0 does next, as a table, and both sides over a real roll call."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from hpc_rl.node import ending
from hpc_rl.node.causes import End, Kind
from hpc_rl.node.ending import (
    ASKED_REPORT_S,
    LINGER_S,
    REPORT_S,
    Situation,
    Step,
    create_once,
    explained,
    leave,
    next_step,
    settle,
)
from hpc_rl.node.peers import Coordinator, Participant, Peers, coordinate, join
from hpc_rl.node.rendezvous import Rendezvous
from hpc_rl.run_dir import lost_file, outcome_file, read_outcome

DEADLINE_S = 600
OK, SAVED, KILLED = 0, 75, 137


def ends(**codes: int) -> dict[int, End]:
    return {int(name[1:]): End(int(name[1:]), code) for name, code in codes.items()}


@pytest.mark.parametrize(
    ("found", "present", "ended_s", "asked_s", "by_slurm", "linger_s", "step"),
    [
        (ends(n0=OK, n1=OK, n2=OK), [], 0, None, False, LINGER_S, Step.DECIDE),
        (ends(n0=OK), [1, 2], 0, None, False, LINGER_S, Step.WAIT),
        (ends(n0=SAVED, n1=SAVED), [1, 2], LINGER_S - 1, None, False, LINGER_S, Step.WAIT),
        (ends(n0=OK, n1=OK), [1, 2], LINGER_S, None, False, LINGER_S, Step.ASK_TO_END),
        (ends(n0=OK), [1, 2], 0, None, False, 0, Step.ASK_TO_END),
        (ends(n0=OK, n1=KILLED), [1, 2], 0, None, False, LINGER_S, Step.ASK_TO_END),
        (ends(n0=OK), [1, 2], 0, None, True, LINGER_S, Step.ASK_TO_END),
        (ends(n0=OK, n1=KILLED), [1, 2], 1, 0.5, False, LINGER_S, Step.WAIT),
        (ends(n0=OK, n1=KILLED), [1], 1, 0.5, False, LINGER_S, Step.DECIDE),  # node 2 has not come yet
        (ends(n0=OK, n1=KILLED), [1, 2], 99, REPORT_S - 1, False, LINGER_S, Step.WAIT),
        (ends(n0=OK, n1=KILLED), [1, 2], 99, REPORT_S, False, LINGER_S, Step.DECIDE),
        (ends(n0=143), [1, 2], 99, ASKED_REPORT_S, True, LINGER_S, Step.DECIDE),
        (ends(n0=143), [1, 2], 99, ASKED_REPORT_S - 1, True, LINGER_S, Step.WAIT),
    ],
)
def test_the_next_step_of_node_0(
    found: dict[int, End], present: list[int], ended_s: float, asked_s: float | None, by_slurm: bool, linger_s: float,
    step: Step,
) -> None:  # fmt: skip
    assert next_step(Situation(3, found, present, ended_s, asked_s, by_slurm, linger_s)) is step


def test_a_node_that_has_printed_its_failure_is_not_a_lost_one() -> None:
    lost = End(1, KILLED, text="the node entry was killed")
    asked = End(0, 143, Kind.TERMINATED)
    assert explained({0: asked, 1: lost}, {1: 2}) == [asked, End(1, 2)]
    assert explained({0: asked}, {2: 2}) == [End(2, 2), asked]
    assert explained({0: asked, 1: lost}, {}) == [asked, lost]


def test_only_the_first_writer_decides(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        wrote = list(pool.map(lambda code: create_once(outcome_file(tmp_path), f"{code}\n"), range(8)))
    assert wrote.count(True) == 1 and read_outcome(tmp_path) == wrote.index(True)
    assert [path.name for path in tmp_path.iterdir()] == [".outcome"]


class Nodes:
    """The nodes of a job on this machine, each in a thread."""

    def __init__(self, folder: Path, count: int, linger_s: float = LINGER_S) -> None:
        self.folder = folder
        self.names = tuple("abcdefgh"[:count])
        self.asked = [threading.Event() for _ in self.names]
        self.shown: list[str] = []
        self._linger_s = linger_s
        self._pool = ThreadPoolExecutor(count)
        self.peers: list[Peers] = [coordinate(Rendezvous(folder, self.names, 0), "127.0.0.1")]
        self.peers += [join(Rendezvous(folder, self.names, rank), DEADLINE_S) for rank in range(1, count)]

    @property
    def head(self) -> Coordinator:
        assert isinstance(self.peers[0], Coordinator)
        return self.peers[0]

    def participant(self, rank: int) -> Participant:
        found = self.peers[rank]
        assert isinstance(found, Participant)
        return found

    def ends(self, rank: int, exit_code: int, kind: Kind = Kind.OWN) -> "Future[int]":
        """Let a node end, agree with the others and leave."""
        own = End(rank, exit_code, kind, f"node {self.names[rank]} ended with {exit_code}")

        def run() -> int:
            code = settle(self.peers[rank], own, self.asked[rank], self._show, self._linger_s)
            leave(self.peers[rank], self.asked[rank])
            return code

        return self._pool.submit(run)

    def _show(self, cause: End | None) -> None:
        self.shown.append(cause.text if cause else "")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def asked_to_end(participant: Participant) -> bool:
    participant.poll()
    return participant.must_end


def test_a_saved_run_stays_saved_whichever_node_is_last(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    first, second = nodes.ends(1, SAVED), nodes.ends(0, SAVED)
    until(lambda: len(nodes.head.ends) == 2, "two reports")
    assert not first.done() and not second.done() and read_outcome(tmp_path) is None
    third = nodes.ends(2, SAVED)
    assert [node.result(DEADLINE_S) for node in (first, second, third)] == [SAVED] * 3
    assert outcome_file(tmp_path).read_text() == "75\n" and nodes.shown == [""]
    assert not (tmp_path / ".roll-call").exists() and not lost_file(tmp_path).exists()


def test_a_failure_ends_all_and_its_code_is_that_of_the_job(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    assert (tmp_path / ".roll-call").stat().st_mode & 0o077 == 0
    cut = nodes.ends(0, 1, Kind.CONNECTION)
    until(lambda: asked_to_end(nodes.participant(1)) and asked_to_end(nodes.participant(2)), "all are asked")
    assert not cut.done()
    others = [nodes.ends(1, 143, Kind.TERMINATED), nodes.ends(2, KILLED)]
    assert [node.result(DEADLINE_S) for node in (cut, *others)] == [KILLED] * 3
    assert nodes.shown == ["node c ended with 137"] and read_outcome(tmp_path) == KILLED


def test_the_end_of_a_driver_is_that_of_the_job(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, linger_s=0)
    head = nodes.ends(0, SAVED)
    until(lambda: asked_to_end(nodes.participant(1)), "the other node is asked")
    assert nodes.ends(1, OK).result(DEADLINE_S) == head.result(DEADLINE_S) == SAVED


def test_processes_that_hang_after_node_0_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "LINGER_S", 0.2)
    nodes = Nodes(tmp_path, 2, linger_s=0.2)
    head = nodes.ends(0, OK)
    until(lambda: asked_to_end(nodes.participant(1)), "the other node is asked")
    assert nodes.ends(1, 143, Kind.TERMINATED).result(DEADLINE_S) == head.result(DEADLINE_S) == 1
    assert nodes.shown == ["processes on node b still run 0 s after those of node a ended: they hang"]


def test_a_node_that_does_not_answer_does_not_block_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "REPORT_S", 0.3)
    monkeypatch.setattr(ending, "LEAVE_S", 0.3)
    nodes = Nodes(tmp_path, 3)
    assert nodes.ends(0, KILLED).result(DEADLINE_S) == KILLED  # nodes 1 and 2 are connected and silent
    assert nodes.ends(1, 143, Kind.TERMINATED).result(DEADLINE_S) == KILLED


def test_slurm_ends_the_job_without_an_outcome(tmp_path: Path) -> None:
    """Then srun has the reason: a node that could not start, or scancel."""
    nodes = Nodes(tmp_path, 2)
    for asked in nodes.asked:
        asked.set()
    found = [nodes.ends(rank, 143, Kind.TERMINATED) for rank in (0, 1)]
    assert [node.result(DEADLINE_S) for node in found] == [143, 143]
    assert read_outcome(tmp_path) is None


def test_a_node_that_failed_before_it_called_is_the_cause(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    nodes.participant(1).close()
    Rendezvous(tmp_path, nodes.names, 1).fail(2)
    until(lambda: nodes.head.poll() or nodes.head.must_end, "the failure is seen")
    assert nodes.ends(0, 143, Kind.TERMINATED).result(DEADLINE_S) == 2
    assert nodes.shown == [""]


def test_a_killed_entry_of_another_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    nodes.head.poll()
    nodes.participant(1).close()
    until(lambda: nodes.head.poll() or nodes.head.must_end, "the loss is seen")
    assert nodes.ends(0, 1, Kind.CONNECTION).result(DEADLINE_S) == KILLED
    assert "the node entry on node b was killed: its processes ended without a report" in nodes.shown[0]


HEAD = """
import sys
from pathlib import Path
from hpc_rl.node.peers import coordinate
from hpc_rl.node.rendezvous import Rendezvous
peers = coordinate(Rendezvous(Path(sys.argv[1]), ("a", "b", "c"), 0), "127.0.0.1")
while True:
    peers.poll()
"""


def test_the_others_agree_after_the_entry_of_node_0_is_killed(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    with subprocess.Popen([sys.executable, "-c", HEAD, str(tmp_path)]) as head:
        participants = [join(Rendezvous(tmp_path, names, rank), DEADLINE_S) for rank in (1, 2)]
        os.kill(head.pid, signal.SIGKILL)
    shown: list[End | None] = []
    with ThreadPoolExecutor(2) as pool:
        never = threading.Event()
        own = [End(1, 143, Kind.TERMINATED), End(2, 1, Kind.CONNECTION)]
        codes = list(pool.map(lambda one, end: settle(one, end, never, shown.append), participants, own))
    assert codes == [KILLED, KILLED] and read_outcome(tmp_path) == KILLED
    assert len(shown) == 1 and shown[0] and shown[0].text.startswith("the node entry on node a was killed")


def test_one_node_listens_nowhere(tmp_path: Path) -> None:
    alone = coordinate(Rendezvous(tmp_path, ("a",), 0), "127.0.0.1")
    shown: list[End | None] = []
    assert settle(alone, End(0, 3), threading.Event(), shown.append) == 3
    leave(alone, threading.Event())
    assert [path.name for path in tmp_path.iterdir()] == [".outcome"] and shown == [End(0, 3)]
