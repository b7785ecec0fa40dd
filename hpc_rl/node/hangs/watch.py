"""Finds hangs: watches the heartbeats of the processes on this node, and those of the other nodes' entries.

A thread of each node entry looks every few seconds. If a process is silent for too long, all nodes collect the stacks
of their processes, tell each other what they see, and come to the same conclusion. One of them prints it and writes it
to `.hang` in the attempt's folder, and all of them end the job.

Clocks of different nodes are not compared. A clock that this module uses stands still while its own process does not
run, so that a job that Slurm suspends does not look like a hang after it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.liveness import flight_records
from hpc_rl.liveness.flight_records import WaitCause
from hpc_rl.liveness.heartbeat import SUFFIX, Heartbeat, read_heartbeat
from hpc_rl.liveness.walltime import RESERVE_S, WalltimeEnd, job_end, unlimited
from hpc_rl.node.hangs import process_status, stack_files
from hpc_rl.node.hangs.node_heartbeats import EXCHANGE_S, NodeHeartbeat, NodeHeartbeats
from hpc_rl.node.hangs.process_status import ProcessMonitor, ProcessStatus
from hpc_rl.run_dir import moved_end_file
from hpc_rl.system.files import write_atomically
from hpc_rl.system.processes import descendants

LONGEST_LOOK_S = 5.0
"""Longest interval between two looks."""
GATHER_S = 2 * (EXCHANGE_S + LONGEST_LOOK_S) + stack_files.ANSWER_S + stack_files.PY_SPY_S + 5.0
"""How long a node waits for what the others see: they hear of a hang over node 0, and then collect their stacks."""
CLAIMED_S = 60.0
"""How long a node waits for the reason after another node has claimed to write it. That node first reads the flight
records of all ranks: 2 MB each."""
CONCLUDE_S = stack_files.ANSWER_S + stack_files.PY_SPY_S + GATHER_S + CLAIMED_S + 5.0
"""How long a conclusion may take."""
HANG = ".hang"
_CLAIM = ".hang-found"
UNTOLD = "another node found a hang, and ended before it could name the process"
_GATHER_POLL_S = 0.2


@dataclass(frozen=True)
class WatchedNode:
    """The node on which a node entry watches."""

    attempt_dir: Path
    nodes: tuple[str, ...]
    node_rank: int
    beats: Path
    """Folder of this node's beats."""
    device: str = "cpu"
    """torch's name of the devices on which the job computes."""

    @property
    def name(self) -> str:
        return self.nodes[self.node_rank]


class HangWatch:
    """Watches from `start` to `close`, in a thread.

    Args:
        hang_timeout_s: trainer.hang_timeout_s.
    """

    def __init__(self, node: WatchedNode, hang_timeout_s: float, job_end: WalltimeEnd) -> None:
        self._node = node
        self._hang_timeout_s = hang_timeout_s
        self._walltime = Walltime(node.attempt_dir.parent / "stop", job_end)
        self._monitor = ProcessMonitor(node.name, hang_timeout_s, on_gpu=node.device != "cpu")
        self._heartbeats = NodeHeartbeats(node.attempt_dir, node.nodes, node.node_rank)
        self._look_s = min(LONGEST_LOOK_S, hang_timeout_s / 5)
        self._exchange_s = min(EXCHANGE_S, hang_timeout_s / 3)
        self._since_exchange_s = self._exchange_s
        self._found = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hangs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def found(self) -> bool:
        """Whether the job hangs, as this node or another one has concluded. The reason has been printed."""
        return self._found.is_set()

    def concluded(self) -> bool:
        """Return whether some node has concluded that the job hangs. Call it after `close`."""
        self._await_reason()
        return self.found or (self._node.attempt_dir / HANG).exists()

    def close(self) -> None:
        """Stop watching, after a conclusion that has begun, and tell the other nodes that this one ends."""
        self._closed.set()
        self._thread.join(CONCLUDE_S)
        if not self.found and not self._thread.is_alive():
            with contextlib.suppress(OSError):
                self._heartbeats.publish(NodeHeartbeat(has_ended=True))

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self._look_s):
            now = time.monotonic()
            try:
                if self._look(min(now - before, 2 * self._look_s)):
                    self._found.set()
                    return
            except Exception as error:  # noqa: BLE001 - without this thread, the other nodes would end the job
                print(f"hpc-rl: a look for hangs failed: {error!r}", flush=True)
            before = now

    def _look(self, elapsed_s: float) -> bool:
        """Look once. Return whether the job hangs."""
        states = process_states()
        names = {pid: stack_files.name_of(pid) for pid, state in states.items() if state in process_status.STOPPED}
        processes = self._monitor.look(read_heartbeats(self._node.beats), states, names, elapsed_s)
        finding = self._walltime.finding(elapsed_s)
        is_found = bool(finding) or any(one.is_suspect for one in processes)
        self._since_exchange_s += elapsed_s
        if not is_found and self._since_exchange_s < self._exchange_s:
            return False
        others = self._exchange(processes)
        finding = finding or self._others_finding(processes)
        if not is_found and not finding and not any(beat.finds_hang for beat in others.values()):
            return False
        self._conclude(processes, states, finding)
        return True

    def _exchange(self, processes: Sequence[ProcessStatus]) -> Mapping[int, NodeHeartbeat]:
        """Publish this node's heartbeat and read those that it watches."""
        elapsed_s, self._since_exchange_s = self._since_exchange_s, 0.0
        try:
            self._heartbeats.publish(NodeHeartbeat(quiet_s=process_status.quiet_s(processes)))
        except OSError:  # a full disk, which silences the others too
            elapsed_s = 0.0
        return self._heartbeats.look(self._heartbeats.watched, elapsed_s)

    def _others_finding(self, processes: Sequence[ProcessStatus]) -> str:
        """Return what is wrong with other nodes, or with all of them; empty if nothing is."""
        for rank, silent_s in self._heartbeats.lost(self._hang_timeout_s, self._exchange_s).items():
            return f"the node entry on node {self._node.nodes[rank]}: no heartbeat for {silent_s:.0f} s"
        driver = process_status.waiting_driver(processes)
        quiet_s = self._heartbeats.quiet_s(process_status.quiet_s(processes)) if self._node.node_rank == 0 else None
        if driver is None or quiet_s is None or quiet_s <= self._hang_timeout_s:
            return ""
        return f"{process_status.described(driver, processes)}; it waits for the others, and all of them wait too"

    def _conclude(self, processes: Sequence[ProcessStatus], states: Mapping[int, str], finding: str) -> None:
        """Alarm the other nodes, collect stacks, hear what the others see, and make the reason known."""
        node = self._node
        with contextlib.suppress(OSError):
            self._heartbeats.publish(NodeHeartbeat(finds_hang=True))
        names = {one.pid: one.name for one in processes if one.phase}
        in_collective: Mapping[int, bool] = {}
        with contextlib.suppress(Exception):  # the verdict does not need them
            in_collective = stack_files.collect(node.beats, node.attempt_dir, node.node_rank, names, states)
        collected = tuple(process_status.with_collectives(processes, in_collective))
        own = NodeHeartbeat(finds_hang=True, has_collected=True, finding=finding, processes=collected)
        with contextlib.suppress(OSError):
            self._heartbeats.publish(own)
        gathered = self._gather()
        if not _is_first(node.attempt_dir):
            self._await_reason()  # the job ends with the first node that leaves
            return
        line = verdict([own, *gathered], records_of(node.attempt_dir)) or UNTOLD
        with contextlib.suppress(OSError):
            write_atomically(node.attempt_dir / HANG, f"{line}\n")
        print(f"hpc-rl: hang: {line}; the stacks of all processes are in {node.attempt_dir / stack_files.FOLDER}",
              flush=True)  # fmt: skip

    def _await_reason(self) -> None:
        """Wait until the node that has begun to write the reason has finished, for at most CLAIMED_S seconds."""
        reason, claim = (self._node.attempt_dir / name for name in (HANG, _CLAIM))
        deadline = time.monotonic() + CLAIMED_S
        while claim.exists() and not reason.exists() and time.monotonic() < deadline:
            time.sleep(_GATHER_POLL_S)

    def _gather(self) -> list[NodeHeartbeat]:
        """Return what the other nodes see, as soon as all have answered or GATHER_S seconds have passed."""
        deadline = time.monotonic() + GATHER_S
        others = [rank for rank in range(len(self._node.nodes)) if rank != self._node.node_rank]
        while True:
            found = self._heartbeats.look(others, 0.0)
            is_complete = all(rank in found and (found[rank].has_collected or found[rank].has_ended) for rank in others)
            if is_complete or (self._node.attempt_dir / HANG).exists() or time.monotonic() > deadline:
                return [beat for beat in found.values() if beat.has_collected]
            time.sleep(_GATHER_POLL_S)


class Walltime:
    """The end of the walltime, which a run must not reach after its stop file was written.

    Args:
        stop: the stop file.
        now: returns the Unix time.
    """

    MARK = "the walltime ends"

    def __init__(self, stop: Path, job_end: WalltimeEnd, now: Callable[[], float] = time.time) -> None:
        self._stop = stop
        self._now = now
        self._job_end = job_end
        self._end: float | None = None
        self._latest_end = 0.0

    def finding(self, elapsed_s: float) -> str:
        """Return what is wrong if the run has not stopped in time, or an empty text.

        Args:
            elapsed_s: time since the last call, before which the stop file did not exist.
        """
        end = self._job_end()
        if end is None or not self._stop.exists():
            return ""
        left_s = end - self._now()
        if left_s <= 0:  # Slurm has moved the end: the job was suspended
            return ""
        if end != self._end:  # a late warning leaves the trainers half of the time
            self._end, self._latest_end = end, end - min(RESERVE_S / 2, (left_s + elapsed_s) / 2)
        if self._now() < self._latest_end:
            return ""
        return f"{self.MARK} in {left_s:.0f} s, and the run has not stopped"


@contextmanager
def watching(node: WatchedNode, hang_timeout_s: float, until_walltime: bool = True) -> Iterator[HangWatch]:
    """Watch while the block runs; without a time limit (0), the watch finds nothing.

    Args:
        until_walltime: whether a run that was asked to stop, and still runs at the end of the walltime, hangs.
    """
    node.beats.mkdir(mode=0o700, exist_ok=True)
    # The end of the walltime is known by the clock of node 0.
    end = job_end(os.environ, moved_end_file(node.attempt_dir)) if until_walltime and node.node_rank == 0 else unlimited
    watch = HangWatch(node, hang_timeout_s, end)
    if not hang_timeout_s:
        yield watch
        return
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


def verdict(heartbeats: Sequence[NodeHeartbeat], records: Sequence[WaitCause] = ()) -> str:
    """Return the one line that names what hangs, from what all nodes see.

    Args:
        records: what the flight records show, the most likely cause first.
    """
    processes = [one for beat in heartbeats for one in beat.processes]
    found = next((beat.finding for beat in heartbeats if beat.finding), "")
    ends = found.startswith(Walltime.MARK)
    suspects = {one.name for one in processes if one.is_suspect}
    known = sorted((one for one in records if one.ranks), key=lambda one: suspects.isdisjoint(one.names))
    late = known[0] if known else WaitCause("")
    culprits = process_status.culprits(processes, late.names, before_limit=ends)
    is_stopped = any(one.is_stopped and one.is_suspect for one in culprits)
    if not culprits or (found and not ends and not is_stopped):
        return found
    first = culprits[0]
    if len(culprits) > 1:
        line, shown = process_status.not_known(culprits), next((finding.line for finding in records), "")
    else:
        line, shown = process_status.described(first, processes), late.line if first.name in late.names else ""
    line = f"{line}; {shown}" if shown and not first.is_stopped else line
    return f"{found}: {line}" if found and not is_stopped else line


def records_of(attempt_dir: Path) -> list[WaitCause]:
    """Return the first finding of each pool in the flight records of an attempt, or none if they cannot be read."""
    found: dict[str, WaitCause] = {}
    with contextlib.suppress(OSError):
        for finding in flight_records.wait_causes(attempt_dir):
            found.setdefault(finding.pool, finding)
    return list(found.values())


def read_heartbeats(folder: Path) -> dict[int, Heartbeat]:
    """Return what the processes of this node have recorded, by process id."""
    found = [beat for path in folder.glob(f"*{SUFFIX}") if (beat := read_heartbeat(path)) is not None]
    return {beat.pid: beat for beat in found}


def process_states() -> dict[int, str]:
    """Return the state in proc(5) of each process below this one. Zombies are left out."""
    states = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state not in ("Z", "X"):
                states[pid] = state
    return states


def _is_first(attempt_dir: Path) -> bool:
    """Return whether this node is the first one with a conclusion; it makes the reason known."""
    try:
        os.close(os.open(attempt_dir / _CLAIM, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
