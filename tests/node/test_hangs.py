"""The watch of a node entry, with real processes: a child that works, or stops."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl.host.walltime import unlimited
from hpc_rl.node import hangs, stack_files
from hpc_rl.node.hangs import HangWatch, Place, Walltime, process_states, read_beats, verdict, watching
from hpc_rl.node.pulses import Pulse, Pulses
from hpc_rl.node.silence import Sight
from tests.sandbox.processes import DEADLINE_S

WORKS = """
import time
from hpc_rl.host.heartbeat import heart
heart.begin("rank 0")
with heart.phase("optimizer"):
    pass
with heart.phase("optimizer"):
    print("ready", flush=True)
    while True:
        heart.beat()
        time.sleep(0.05)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(stack_files, "py_spy", lambda _pid: "")
    attempt = tmp_path / "run" / "attempt-1"
    attempt.mkdir(parents=True)
    return Place(attempt, ("n1",), 0, tmp_path / "beats")


@contextmanager
def worker(place: Place) -> Iterator[subprocess.Popen[str]]:
    place.beats.mkdir(exist_ok=True)
    environ = {**os.environ, "HPC_RL_HEARTBEATS": str(place.beats)}
    with subprocess.Popen([sys.executable, "-c", WORKS], env=environ, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_stopped_process_is_found_and_named(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    with worker(place) as child, watching(place, 0.5) as watch:
        assert not watch.concluded()
        child.send_signal(signal.SIGSTOP)
        until(lambda: watch.found)
        assert watch.concluded()
    line = (place.attempt_dir / ".hang").read_text()
    assert line.startswith("rank 0 on node n1 is stopped (SIGSTOP): no sign of life for ") and line.endswith(
        "optimizer\n"
    )
    assert capsys.readouterr().out == (
        f"hpc-rl: hang: {line.strip()}; the stacks of all processes are in {place.attempt_dir / 'stacks'}\n"
    )
    assert (place.attempt_dir / "stacks" / f"node0-rank-0-{child.pid}.txt").exists()


def test_a_process_that_works_is_not_found(place: Place) -> None:
    with worker(place):
        watch = HangWatch(place, 10.0, job_end=unlimited)
        for _ in range(3):
            before = read_beats(place.beats)
            until(lambda: read_beats(place.beats) != before)  # noqa: B023
            assert not watch._look(9.0)
    assert not (place.attempt_dir / ".hang").exists()


def test_the_time_in_which_the_watch_does_not_run_is_not_counted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Slurm has suspended the job for an hour."""
    clock, counted = iter([0.0, 2.0, 3602.0, 3604.0]), list[float]()
    watch = HangWatch(place, 10.0, job_end=unlimited)
    monkeypatch.setattr(hangs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(watch._closed, "wait", lambda _look_s: len(counted) == 3)
    monkeypatch.setattr(watch, "_look", counted.append)
    watch._watch()
    assert counted == [2.0, 4.0, 2.0]


def test_without_a_limit_nothing_is_watched(place: Place) -> None:
    with watching(place, 0) as watch:
        assert not watch._thread.is_alive()
    assert not watch.concluded() and not list(place.attempt_dir.iterdir())


def test_the_end_of_a_node_is_no_hang(tmp_path: Path) -> None:
    first, second = (Place(tmp_path, ("n1", "n2"), rank, tmp_path / f"beats{rank}") for rank in (0, 1))
    with watching(second, 60):
        pass
    watch = HangWatch(first, 60.0, job_end=unlimited)
    first.beats.mkdir()
    assert not any(watch._look(100.0) for _ in range(4))


def test_another_node_entry_that_stops_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "GATHER_S", 0.1)
    place = Place(tmp_path, ("n1", "n2"), 0, tmp_path / "beats")
    place.beats.mkdir()
    Pulses(tmp_path, place.nodes, 1).publish(Pulse())
    watch = HangWatch(place, 30.0, job_end=unlimited)
    assert [watch._look(elapsed) for elapsed in (1.0, 20.0, 20.0)] == [False, False, False]
    assert watch._look(21.0)
    assert (tmp_path / ".hang").read_text() == "the node entry on node n2: no sign of life for 61 s\n"


def test_the_nodes_come_to_one_conclusion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second node has seen nothing itself. It joins the first, and what it knows counts."""
    stopped = Sight("rank 1", "n2", 1, 70, 60, "T", "data", 3)
    first, second = (Place(tmp_path, ("n1", "n2"), rank, tmp_path / f"beats{rank}") for rank in (0, 1))
    Pulses(tmp_path, first.nodes, 1).publish(Pulse(finds_hang=True, has_collected=True, sights=(stopped,)))
    watch = HangWatch(first, 60.0, job_end=unlimited)
    first.beats.mkdir()
    assert watch._look(1.0)
    assert (
        (tmp_path / ".hang").read_text().startswith("rank 1 on node n2 is stopped (SIGSTOP): no sign of life for 70 s")
    )
    second.beats.mkdir()
    assert HangWatch(second, 60.0, job_end=unlimited)._look(1.0)
    assert capsys.readouterr().out.count("hang: ") == 1  # of the first


def test_a_job_in_which_everybody_waits(tmp_path: Path) -> None:
    place = Place(tmp_path, ("n1",), 0, tmp_path / "beats")
    watch = HangWatch(place, 60.0, job_end=unlimited)
    driver = Sight("the driver", "n1", 1, 61, 60, phase="gen", step=3, waits=True)
    idle = Sight("rank 0", "n1", 2, 500, 60, phase="run", waits=True)
    assert watch._others_finding([driver, idle]) == (
        "the driver on node n1: no sign of life for 61 s in gen of step 3; it waits for the others, and all "
        "of them wait too"
    )
    assert watch._others_finding([driver, Sight("rank 0", "n1", 2, 1, 60, phase="update")]) == ""
    other = Place(tmp_path, ("n1", "n2"), 1, tmp_path / "beats")
    assert HangWatch(other, 60.0, job_end=unlimited)._others_finding([driver, idle]) == ""  # node 0 knows all nodes


SLOW = Sight("rank 0", "n1", 1, 50, 60, phase="data", step=3)
SILENT = Sight("rank 1", "n2", 1, 61, 60, phase="data", step=3)
STOPPED = Sight("rank 2", "n2", 1, 61, 60, "T", "data", 3)
LATE = "the walltime ends in 30 s, and the run has not stopped"


@pytest.mark.parametrize(
    ("pulses", "line"),
    [
        (
            [Pulse(sights=(SLOW,)), Pulse(sights=(SILENT,))],
            "rank 1 on node n2: no sign of life for 61 s in data of step 3",
        ),
        (
            [Pulse(finding="the node entry on node n3: no", sights=(SLOW, SILENT)), Pulse()],
            "the node entry on node n3: no",
        ),
        (
            [Pulse(finding="the node entry on node n3: no"), Pulse(sights=(STOPPED,))],
            "rank 2 on node n2 is stopped (SIGSTOP): no sign of life for 61 s in data of step 3",
        ),
        (
            [Pulse(finding=LATE, sights=(SLOW,))],
            f"{LATE}: rank 0 on node n1: no sign of life for 50 s in data of step 3",
        ),
        ([Pulse(finding=LATE)], LATE),
    ],
)
def test_the_verdict(pulses: list[Pulse], line: str) -> None:
    assert verdict(pulses) == line


def test_a_run_has_to_stop_before_the_walltime(tmp_path: Path) -> None:
    stop, now = tmp_path / "stop", 1000.0
    end = now + 300
    walltime = Walltime(stop, job_end=lambda: end, now=lambda: now)
    assert walltime.finding(5) == ""
    now += 280
    assert walltime.finding(5) == ""  # nobody has asked it to stop
    stop.write_text("walltime\n")
    assert walltime.finding(4) == ""  # it has been asked for at most 4 s, of 24 that were left
    now += 7
    assert walltime.finding(5) == ""
    now += 1
    assert walltime.finding(5) == "the walltime ends in 12 s, and the run has not stopped"
    end += 50  # the job was suspended
    assert walltime.finding(5) == ""
    now += 55
    assert walltime.finding(5) == "the walltime ends in 7 s, and the run has not stopped"
    early = Walltime(stop, job_end=lambda: now + 31, now=lambda: now - 100)
    assert early.finding(5) == ""
    assert Walltime(stop, job_end=unlimited, now=lambda: now).finding(5) == ""


@pytest.mark.parametrize(("left_s", "is_due"), [(15.5, False), (14.5, True), (-0.5, False)])
def test_an_early_warning_leaves_time_until_the_reserve(tmp_path: Path, left_s: float, is_due: bool) -> None:
    (tmp_path / "stop").write_text("walltime\n")
    now = 0.0
    walltime = Walltime(tmp_path / "stop", job_end=lambda: 600.0, now=lambda: now)
    assert walltime.finding(5) == ""
    now = 600 - left_s
    assert bool(walltime.finding(5)) is is_due  # an end that has passed is not the end: the job was suspended


def test_the_states_of_processes() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        until(lambda: process_states().get(child.pid) == "S")
        child.send_signal(signal.SIGSTOP)
        until(lambda: process_states()[child.pid] == "T")
        child.kill()
        until(lambda: child.pid not in process_states())  # a zombie
