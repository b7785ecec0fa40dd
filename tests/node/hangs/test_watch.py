"""The watch of a node entry, with real processes: a child that works, or stops."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_rl.liveness.flight_records import WaitCause
from hpc_rl.liveness.walltime import unlimited
from hpc_rl.node.hangs import stack_files
from hpc_rl.node.hangs import watch as hang_watch
from hpc_rl.node.hangs.node_heartbeats import NodeHeartbeat, NodeHeartbeats, read_node_heartbeat
from hpc_rl.node.hangs.process_status import ProcessStatus
from hpc_rl.node.hangs.watch import HangWatch, Walltime, WatchedNode, process_states, read_heartbeats, verdict, watching
from tests.finetune.forked import Forked
from tests.sandbox.processes import DEADLINE_S

GPU_WAITS = str(Path(__file__).with_name("gpu_waits.py"))
WORKS = """
import time
from hpc_rl.liveness.heartbeat import heart
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
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedNode:
    monkeypatch.setattr(stack_files, "py_spy", lambda _pid: "")
    attempt = tmp_path / "run" / "attempt-1"
    attempt.mkdir(parents=True)
    return WatchedNode(attempt, ("n1",), 0, tmp_path / "beats")


@contextmanager
def ranks_on_gpus(node: WatchedNode, folder: Path) -> Iterator[None]:
    """Three ranks, of which two wait for rank 1 where their stacks do not show it."""
    node.beats.mkdir(exist_ok=True)
    environ = {**os.environ, "HPC_RL_HEARTBEATS": str(node.beats), "OMP_NUM_THREADS": "1"}
    children = []
    try:
        for rank in "012":
            output = folder / rank
            output.mkdir()
            command = [GPU_WAITS, rank, str(folder / "group"), str(node.attempt_dir)]
            children.append(Forked(command, environ, output))
        until(lambda: all((folder / f"ready-{rank}").exists() for rank in "012"))
        yield
    finally:
        for child in children:
            child.kill()


@contextmanager
def worker(node: WatchedNode) -> Iterator[subprocess.Popen[str]]:
    node.beats.mkdir(exist_ok=True)
    environ = {**os.environ, "HPC_RL_HEARTBEATS": str(node.beats)}
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


def test_a_stopped_process_is_found_and_named(node: WatchedNode, capsys: pytest.CaptureFixture[str]) -> None:
    with worker(node) as child, watching(node, 0.5) as watch:
        assert not watch.concluded()
        child.send_signal(signal.SIGSTOP)
        until(lambda: watch.found)
        assert watch.concluded()
    line = (node.attempt_dir / ".hang").read_text()
    assert line.startswith("rank 0 on node n1 is stopped (SIGSTOP): no heartbeat for ") and line.endswith("optimizer\n")
    assert capsys.readouterr().out == (
        f"hpc-rl: hang: {line.strip()}; the stacks of all processes are in {node.attempt_dir / 'stacks'}\n"
    )
    assert (node.attempt_dir / "stacks" / f"node0-rank-0-{child.pid}.txt").exists()


def test_on_gpus_the_rank_is_named_that_the_others_wait_for(node: WatchedNode, tmp_path: Path) -> None:
    """Each rank writes its flight record with its stacks, and before the verdict."""
    node = replace(node, device="cuda")
    with ranks_on_gpus(node, tmp_path), watching(node, 5.0) as watch:
        until(lambda: watch.found)
    line = (node.attempt_dir / ".hang").read_text()
    stacks = [path.read_text() for path in sorted((node.attempt_dir / "stacks").iterdir())]
    assert [stack_files.waits_for_others(text) for text in stacks] == [False] * 3
    assert re.fullmatch(
        r"rank 1 on node n1: no heartbeat for \d+ s in forward_backward; rank 1 did not reach all_reduce \[\[8\]\], "
        r"number \d of group default_pg, in which ranks 0, 2 wait.*; the last one was all_gather.*\n",
        line,
    ), line
    seen = read_node_heartbeat(node.attempt_dir, 0)
    assert seen is not None
    alone = verdict([seen])
    assert "it is not known which of them keeps the others waiting" in alone and alone.count("rank ") == 3


def test_a_process_that_works_is_not_found(node: WatchedNode) -> None:
    with worker(node):
        watch = HangWatch(node, 10.0, job_end=unlimited)
        for _ in range(3):
            before = read_heartbeats(node.beats)
            until(lambda: read_heartbeats(node.beats) != before)  # noqa: B023
            assert not watch._look(9.0)
    assert not (node.attempt_dir / ".hang").exists()


def test_the_time_in_which_the_watch_does_not_run_is_not_counted(
    node: WatchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Slurm has suspended the job for an hour."""
    clock, counted = iter([0.0, 2.0, 3602.0, 3604.0]), list[float]()
    watch = HangWatch(node, 10.0, job_end=unlimited)
    monkeypatch.setattr(hang_watch, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(watch._closed, "wait", lambda _look_s: len(counted) == 3)
    monkeypatch.setattr(watch, "_look", counted.append)
    watch._watch()
    assert counted == [2.0, 4.0, 2.0]


def test_without_a_limit_nothing_is_watched(node: WatchedNode) -> None:
    with watching(node, 0) as watch:
        assert not watch._thread.is_alive()
    assert not watch.concluded() and not list(node.attempt_dir.iterdir())


def test_the_end_of_a_node_is_no_hang(tmp_path: Path) -> None:
    first, second = (WatchedNode(tmp_path, ("n1", "n2"), rank, tmp_path / f"beats{rank}") for rank in (0, 1))
    with watching(second, 60):
        pass
    watch = HangWatch(first, 60.0, job_end=unlimited)
    first.beats.mkdir()
    assert not any(watch._look(100.0) for _ in range(4))


def test_another_node_entry_that_stops_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "GATHER_S", 0.1)
    node = WatchedNode(tmp_path, ("n1", "n2"), 0, tmp_path / "beats")
    node.beats.mkdir()
    NodeHeartbeats(tmp_path, node.nodes, 1).publish(NodeHeartbeat())
    watch = HangWatch(node, 30.0, job_end=unlimited)
    assert [watch._look(elapsed) for elapsed in (1.0, 20.0, 20.0)] == [False, False, False]
    assert watch._look(21.0)
    assert (tmp_path / ".hang").read_text() == "the node entry on node n2: no heartbeat for 61 s\n"


def test_the_nodes_come_to_one_conclusion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second node has seen nothing itself. It joins the first, and what it knows counts."""
    stopped = ProcessStatus("rank 1", "n2", 1, 70, 60, "T", "data", 3)
    first, second = (WatchedNode(tmp_path, ("n1", "n2"), rank, tmp_path / f"beats{rank}") for rank in (0, 1))
    NodeHeartbeats(tmp_path, first.nodes, 1).publish(
        NodeHeartbeat(finds_hang=True, has_collected=True, processes=(stopped,))
    )
    watch = HangWatch(first, 60.0, job_end=unlimited)
    first.beats.mkdir()
    assert watch._look(1.0)
    assert (tmp_path / ".hang").read_text().startswith("rank 1 on node n2 is stopped (SIGSTOP): no heartbeat for 70 s")
    second.beats.mkdir()
    assert HangWatch(second, 60.0, job_end=unlimited)._look(1.0)
    assert capsys.readouterr().out.count("hang: ") == 1  # of the first


def test_a_job_in_which_everybody_waits(tmp_path: Path) -> None:
    node = WatchedNode(tmp_path, ("n1",), 0, tmp_path / "beats")
    watch = HangWatch(node, 60.0, job_end=unlimited)
    driver = ProcessStatus("the driver", "n1", 1, 61, 60, phase="gen", step=3, waits=True)
    idle = ProcessStatus("rank 0", "n1", 2, 500, 60, phase="run", waits=True)
    assert watch._others_finding([driver, idle]) == (
        "the driver on node n1: no heartbeat for 61 s in gen of step 3; it waits for the others, and all "
        "of them wait too"
    )
    assert watch._others_finding([driver, ProcessStatus("rank 0", "n1", 2, 1, 60, phase="update")]) == ""
    other = WatchedNode(tmp_path, ("n1", "n2"), 1, tmp_path / "beats")
    assert HangWatch(other, 60.0, job_end=unlimited)._others_finding([driver, idle]) == ""  # node 0 knows all nodes


SLOW = ProcessStatus("rank 0", "n1", 1, 50, 60, phase="data", step=3)
SILENT = ProcessStatus("rank 1", "n2", 1, 61, 60, phase="data", step=3)
STOPPED = ProcessStatus("rank 2", "n2", 1, 61, 60, "T", "data", 3)
LATE = "the walltime ends in 30 s, and the run has not stopped"


@pytest.mark.parametrize(
    ("heartbeats", "line"),
    [
        (
            [NodeHeartbeat(processes=(SLOW,)), NodeHeartbeat(processes=(SILENT,))],
            "rank 1 on node n2: no heartbeat for 61 s in data of step 3",
        ),
        (
            [NodeHeartbeat(finding="the node entry on node n3: no", processes=(SLOW, SILENT)), NodeHeartbeat()],
            "the node entry on node n3: no",
        ),
        (
            [NodeHeartbeat(finding="the node entry on node n3: no"), NodeHeartbeat(processes=(STOPPED,))],
            "rank 2 on node n2 is stopped (SIGSTOP): no heartbeat for 61 s in data of step 3",
        ),
        (
            [NodeHeartbeat(finding=LATE, processes=(SLOW,))],
            f"{LATE}: rank 0 on node n1: no heartbeat for 50 s in data of step 3",
        ),
        ([NodeHeartbeat(finding=LATE)], LATE),
    ],
)
def test_the_verdict(heartbeats: list[NodeHeartbeat], line: str) -> None:
    assert verdict(heartbeats) == line


GPU = [
    ProcessStatus(f"rank {rank}", f"n{rank}", 1, silent_s, 60, phase="data", step=3, in_collective=False, on_gpu=True)
    for rank, silent_s in enumerate((65, 61, 64))
]
LATE_RANK = WaitCause("rank 1 did not reach all_reduce [[8]], number 2 of group default_pg", (1,))
STUCK = WaitCause("all ranks began all_reduce [[8]], number 2 of group default_pg")


@pytest.mark.parametrize(
    ("finding", "records", "line"),
    [
        ("", [LATE_RANK], f"rank 1 on node n1: no heartbeat for 61 s in data of step 3; {LATE_RANK.line}"),
        (LATE, [LATE_RANK], f"{LATE}: rank 1 on node n1: no heartbeat for 61 s in data of step 3; {LATE_RANK.line}"),
        (
            "",
            [STUCK],
            "rank 0 on node n0, rank 1 on node n1, rank 2 on node n2: no heartbeat for 61 to 65 s in data of step 3;"
            " it is not known which of them keeps the others waiting: the stacks of processes that wait for a GPU do "
            f"not show it, and neither do the flight records; {STUCK.line}",
        ),
        ("the node entry on node n3: no", [LATE_RANK], "the node entry on node n3: no"),
    ],
)
def test_on_gpus_the_flight_records_name_the_rank(finding: str, records: list[WaitCause], line: str) -> None:
    """All ranks are in a read of their GPU; one of these reads waits for nobody else."""
    heartbeats = [NodeHeartbeat(finding=finding, processes=(GPU[0],)), NodeHeartbeat(processes=(GPU[1], GPU[2]))]
    assert verdict(heartbeats, records) == line


def test_a_rank_of_a_pool_is_found_by_its_name() -> None:
    ranks = NodeHeartbeat(processes=tuple(replace(one, name=f"{one.name} of pool train") for one in GPU))
    assert verdict([ranks], [LATE_RANK]).startswith("rank 0 of pool train on node n0, rank 1 of pool")
    of_pool = replace(LATE_RANK, pool="train")
    assert verdict([ranks], [STUCK, of_pool]).startswith("rank 1 of pool train on node n1: no heartbeat")


def test_what_the_records_add_to_a_stopped_process_is_not_shown() -> None:
    absent = WaitCause("rank 2 left no record", (2,))
    assert verdict([NodeHeartbeat(processes=(GPU[0], STOPPED))], [absent]).endswith(
        "no heartbeat for 61 s in data of step 3"
    )


def test_a_node_that_is_not_the_first_waits_until_the_reason_is_written(tmp_path: Path) -> None:
    """The first node that ends may end the job, before another one has written the reason."""
    node = WatchedNode(tmp_path, ("n1",), 0, tmp_path / "beats")
    node.beats.mkdir()
    (tmp_path / ".hang-found").touch()
    watch = HangWatch(node, 60.0, job_end=unlimited)
    with ThreadPoolExecutor(1) as pool:
        concluded = pool.submit(watch._conclude, [STOPPED], {}, "")
        until(lambda: (tmp_path / ".node0.heartbeat").exists() and '"has_collected": true' in read(tmp_path))
        assert not concluded.done()
        (tmp_path / ".hang").write_text("the reason\n")
        concluded.result(DEADLINE_S)
    assert (tmp_path / ".hang").read_text() == "the reason\n"


def read(folder: Path) -> str:
    return (folder / ".node0.heartbeat").read_text()


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
