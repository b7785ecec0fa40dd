"""Which processes of a job have no heartbeat, and which of them keeps the others waiting. Pure functions.

A process is silent for too long if it is stopped, or if its work shows no progress, for longer than its phase may take.
A process that waits for others is judged together with them: only if nobody works.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_rl.liveness.heartbeat import PROGRAM, RUN, Heartbeat

LONG = 4
"""A long phase, and the first time in any phase, may take this many times trainer.hang_timeout_s."""
LONG_PHASES = frozenset(
    {
        *(RUN, "load", "save_checkpoint", "save", "saved", "export", "testing"),
        *("gen", "generate", "advance", "connect_engines", "send_weights", "sync_engine", "update_weights"),
    }
)
"""Phases that read or write whole models, or generate: the shared file system and an engine set their pace."""
UNLIMITED = frozenset({"start", PROGRAM})
"""Phases for which the driver has a limit (trainer.model_timeout_s), or of which nothing is known."""
PATIENCE = 10
"""A phase may take this many times the longest pause between two of its beats so far."""
STOPPED = ("T", "t")
"""States in proc(5) of a process that has received SIGSTOP, or that a debugger holds."""
BLOCKED = "D"
_RANK = re.compile(r"rank \d+(.*)")
"""Name of a rank, and its pool. Ranks of a pool wait for each other, and engines do not."""
MOST_NAMES = 4


@dataclass(frozen=True)
class ProcessStatus:
    """One process as its node entry sees it."""

    name: str
    node: str
    pid: int
    silent_s: float
    """Seconds since its last beat, or in which it was stopped."""
    limit_s: float
    state: str = "S"
    """Its state in proc(5)."""
    phase: str = ""
    """Empty for a process without beats."""
    step: int = 0
    waits: bool = False
    in_collective: bool | None = None
    """Whether its stacks show that it waits for other ranks; None if it has not shown its stacks."""
    on_gpu: bool = False
    """Whether the job computes on GPUs. A process that reads a value from its GPU waits there for all that it has
    started before, also for collectives. Its stacks do not show what it waits for."""

    @property
    def is_stopped(self) -> bool:
        return self.state in STOPPED

    @property
    def is_suspect(self) -> bool:
        """Whether it is silent for too long."""
        return (self.is_stopped or not self.waits) and self.silent_s > self.limit_s

    @property
    def is_open(self) -> bool:
        """Whether its stacks do not show if it waits for others."""
        return self.on_gpu and self.in_collective is False and not self.waits and not self.is_stopped


class ProcessMonitor:
    """What the processes of one node have recorded, from look to look.

    Args:
        node: its name.
        hang_timeout_s: trainer.hang_timeout_s.
        on_gpu: whether the job computes on GPUs.
    """

    def __init__(self, node: str, hang_timeout_s: float, on_gpu: bool = False) -> None:
        self._node = node
        self._on_gpu = on_gpu
        self._hang_timeout_s = hang_timeout_s
        self._beats: dict[int, Heartbeat] = {}
        self._silent_s: dict[int, float] = {}
        self._stopped_s: dict[int, float] = {}
        self._longest_s: dict[str, float] = {}
        """Longest pause between two beats, by phase, of all processes."""

    def look(
        self, beats: Mapping[int, Heartbeat], states: Mapping[int, str], names: Mapping[int, str], elapsed_s: float
    ) -> list[ProcessStatus]:
        """Return the processes that record beats, and others that are stopped.

        Args:
            beats: by process id. A process whose file cannot be read now is taken to be as before.
            states: the state in proc(5) of each process of the job on this node.
            names: names of processes without beats.
            elapsed_s: time since the last look in which this process itself could run.
        """
        known = {**self._beats, **beats}
        self._silent_s = {pid: self._silence(pid, known[pid], elapsed_s) for pid in known if pid in states}
        self._beats = {pid: beat for pid, beat in known.items() if pid in states}
        stopped = [pid for pid, state in states.items() if state in STOPPED]
        self._stopped_s = {pid: self._stopped_s.get(pid, -elapsed_s) + elapsed_s for pid in stopped}
        return [self._status(pid, states[pid], names) for pid in sorted({*self._beats, *stopped})]

    def limit_s(self, beat: Heartbeat) -> float:
        """Return for how long a process may be silent after this beat."""
        if beat.phase in UNLIMITED:
            return math.inf
        factor = LONG if beat.is_first or beat.phase in LONG_PHASES else 1
        return max(self._hang_timeout_s * factor, PATIENCE * self._longest_s.get(beat.phase, 0.0))

    def _silence(self, pid: int, beat: Heartbeat, elapsed_s: float) -> float:
        """Return for how long a process has been silent."""
        before = self._beats.get(pid)
        if before is None:
            return 0.0
        silent_s = self._silent_s[pid] + elapsed_s
        if beat.count == before.count:
            return silent_s
        if not before.waits and not before.is_first:
            self._longest_s[before.phase] = max(silent_s, self._longest_s.get(before.phase, 0.0))
        return 0.0

    def _status(self, pid: int, state: str, names: Mapping[int, str]) -> ProcessStatus:
        beat = self._beats.get(pid)
        if state in STOPPED:  # a process without beats has been seen since it was stopped, and may have worked before
            silent_s, limit_s = self._stopped_s[pid], self._hang_timeout_s
        else:
            assert beat is not None
            silent_s, limit_s = self._silent_s[pid], self.limit_s(beat)
        if beat is None:
            return ProcessStatus(names.get(pid, f"process {pid}"), self._node, pid, silent_s, limit_s, state)
        seen = ProcessStatus(beat.name, self._node, pid, silent_s, limit_s, state, on_gpu=self._on_gpu)
        return replace(seen, phase=beat.phase, step=beat.step, waits=beat.waits)


def quiet_s(processes: Sequence[ProcessStatus]) -> float | None:
    """Return for how long no process of these has shown progress, if all of them wait; None if one of them works.

    Without any, it is infinite.
    """
    if any(not one.waits for one in processes if one.phase):
        return None
    return min((one.silent_s for one in processes if one.phase), default=math.inf)


def culprits(
    processes: Iterable[ProcessStatus], late: Collection[str] = (), before_limit: bool = False
) -> list[ProcessStatus]:
    """Return the process that keeps the others waiting; several processes if it is not known which of them does.

    A stopped one comes first, then one for which the others wait according to the flight records, then one that waits
    for no other rank, then the one that has been silent for longest. If all that are silent for too long wait for other
    ranks, a rank that does not wait counts too if it has been silent for longer than the shortest of their limits, even
    if its own limit is longer. On GPUs, stacks can leave open which of several processes waits.

    Args:
        late: names of the ranks for which others wait according to the flight records.
        before_limit: whether a process counts before its limit too.

    Returns:
        an empty list if no process is silent for too long.
    """
    seen = list(processes)
    suspects = [one for one in seen if one.is_suspect or (before_limit and (one.is_stopped or not one.waits))]
    if not suspects:
        return []
    if all(one.in_collective for one in suspects):
        shortest_s, step = min(one.limit_s for one in suspects), suspects[0].step
        suspects += [
            one
            for one in seen
            if one.in_collective is False and not one.waits and one.step == step and one.silent_s > shortest_s
        ]
    named = [one for one in seen if one.name in late and not one.waits and not one.in_collective]
    if named and not any(one.is_stopped for one in suspects):
        return [max(named, key=_blame)]
    worst = max(suspects, key=_blame)
    return [worst, *(one for one in seen if one != worst and _may_wait(worst, one))]


def _may_wait(worst: ProcessStatus, other: ProcessStatus) -> bool:
    """Return whether two processes are ranks of one pool, and each of them may wait for the other: one that is silent,
    also for one that works."""
    teams = [_RANK.fullmatch(one.name) for one in (worst, other) if one.is_open]
    return len(teams) == 2 and None not in teams and len({team[1] for team in teams if team}) == 1


def _blame(process: ProcessStatus) -> tuple[bool, bool, bool, bool, float]:
    return process.is_stopped, bool(process.phase), not process.in_collective, not process.is_open, process.silent_s


def waiting_driver(processes: Iterable[ProcessStatus]) -> ProcessStatus | None:
    """Return the process that starts the work of all others, of a job in which everybody waits."""
    waiting = [one for one in processes if one.waits and one.phase]
    return max(waiting, key=lambda process: process.phase != RUN, default=None)


def described(process: ProcessStatus, all_processes: Iterable[ProcessStatus] = ()) -> str:
    """Return what a process did when it fell silent: `rank 1 on node n2: no heartbeat for 300 s in optimizer`."""
    step = process.step or max((other.step for other in all_processes), default=0)
    of_step = f" of step {step}" if step else ""
    where = (
        f" in {process.phase}{of_step}" if process.phase and process.phase != RUN else of_step.replace(" of", " in", 1)
    )
    who = f"{process.name} on node {process.node}"
    if process.is_stopped:
        who += " is stopped (SIGSTOP)"
    elif process.state == BLOCKED:
        who += " is blocked in the kernel, usually by a file system"
    return f"{who}: no heartbeat for {process.silent_s:.0f} s{where}"


def not_known(processes: Sequence[ProcessStatus]) -> str:
    """Return what is known about processes if any of them may keep the others waiting."""
    names = [f"{one.name} on node {one.node}" for one in processes]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    places = sorted({f"{one.phase} of step {one.step}" if one.step else one.phase for one in processes})
    shortest_s, longest_s = min(one.silent_s for one in processes), max(one.silent_s for one in processes)
    return (
        f"{', '.join(names[:MOST_NAMES] + more)}: no heartbeat for {shortest_s:.0f} to {longest_s:.0f} s in "
        f"{', '.join(places[:MOST_NAMES])}; it is not known which of them keeps the others waiting: the stacks "
        "of processes that wait for a GPU do not show it, and neither do the flight records"
    )


def with_collectives(processes: Iterable[ProcessStatus], in_collective: Mapping[int, bool]) -> list[ProcessStatus]:
    """Return the processes with what the stacks show, by process id."""
    return [replace(one, in_collective=in_collective.get(one.pid)) for one in processes]
