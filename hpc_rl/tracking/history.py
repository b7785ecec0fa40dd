"""A run's history: its attempts, how they ended, and their node hours.

The run directory is enough for all of it. Slurm's accounting, if there is any, completes the attempts that were killed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.formats.offer import LentNode, read_lent_nodes
from hpc_rl.formats.usage import NodeUsage, read_spans
from hpc_rl.run_dir import RunDir
from hpc_rl.slurm.accounting import JobStart
from hpc_rl.slurm.states import ENDED

KILLED = "KILLED"
"""Ended from outside: cancelled, requeued by hand, out of time, or on a lost node."""
_TERMINATED = 128 + signal.SIGTERM
"""Exit code of a node that was told to end: the cause is on another node."""
_OWN_LOGS = re.compile(r"node(\d+)[.-]")


@dataclass(frozen=True)
class Attempt:
    """One start of a run's job."""

    number: int
    job_id: str
    state: str
    """RUNNING, COMPLETED, STOPPED, REQUEUED, FAILED, KILLED, or a state of Slurm."""
    exit_code: int | None
    began: float | None
    """Unix seconds; None for a start that never reached a node."""
    ended: float | None
    """Unix seconds of the last line that it wrote."""
    nodes: int
    node_hours: float
    lent: tuple[LentNode, ...] = ()
    """Nodes of other jobs, which are in no other number."""

    @property
    def lent_hours(self) -> float:
        """Node hours of other jobs: for as long as their nodes took part."""
        return sum(node.hours(self.ended or 0.0) for node in self.lent)

    @property
    def is_open(self) -> bool:
        """Whether the run directory does not tell how the attempt ended."""
        return self.state in (KILLED, "RUNNING")

    @property
    def seconds(self) -> float:
        return (self.ended or 0.0) - (self.began or 0.0)


@dataclass(frozen=True)
class History:
    """All attempts of a run, oldest first."""

    attempts: tuple[Attempt, ...]

    @property
    def requeues(self) -> int:
        """Return how often Slurm started the same job again."""
        return sum(before.job_id == after.job_id != "" for before, after in pairwise(self.attempts))

    @property
    def node_hours(self) -> float:
        return sum(attempt.node_hours for attempt in self.attempts)

    @property
    def lent_hours(self) -> float:
        return sum(attempt.lent_hours for attempt in self.attempts)


def read_history(run: RunDir) -> History:
    """Read a run's history from its directory: status.json, and the first and last line of each node's usage file."""
    folders = run.attempts()
    spans = [read_spans(folder) for folder in folders]
    status = run.read_status()
    job_ids = [nodes[0].job_id if nodes else "" for nodes in spans]
    attempts = []
    for index, (folder, nodes) in enumerate(zip(folders, spans, strict=True)):
        number = int(folder.name.rpartition("-")[2])
        own = status if status.get("attempt") == number else {}
        job_id = job_ids[index] or str(own.get("job_id", ""))
        again = index + 1 < len(folders) and job_ids[index + 1] == job_id != ""
        exit_code, state = _ending(nodes, own, again)
        began, ended, count = _span(folder, nodes)
        hours = sum(node.hours for node in nodes) if nodes else count * ((ended or 0) - (began or 0)) / 3600
        lent = tuple(read_lent_nodes(folder))
        attempts.append(Attempt(number, job_id, state, exit_code, began, ended, count, hours, lent))
    return History(tuple(attempts))


def tone(state: str) -> str:
    """Return how a state is coloured: `done`, `failed`, or empty for a run that can go on."""
    return "done" if state == "COMPLETED" else "failed" if state in ENDED or state == KILLED else ""


def ended_with(found: History, exit_code: int, time: float) -> History:
    """Return the history with its last attempt ended at `time` with `exit_code`."""
    if not found.attempts:
        return found
    *before, last = found.attempts
    state = {0: "COMPLETED", EXIT_STOPPED: "STOPPED"}.get(exit_code, "FAILED")
    hours = last.node_hours + last.nodes * (time - (last.ended or time)) / 3600
    last = replace(last, state=state, exit_code=exit_code, ended=time, node_hours=hours)
    return History((*before, last))


def with_accounting(found: History, starts: Sequence[JobStart]) -> History:
    """Complete open attempts by Slurm's accounting.

    An attempt is the last start of its job that began before the attempt did. Slurm counts the whole allocation, but
    not the seconds in which a requeued job still ends.
    """
    return History(tuple(_accounted(attempt, starts) if attempt.is_open else attempt for attempt in found.attempts))


def _accounted(attempt: Attempt, starts: Sequence[JobStart]) -> Attempt:
    # One second of tolerance between the clocks of nodes and controller.
    mine = [s for s in starts if s.job_id == attempt.job_id and s.began <= (attempt.began or s.began) + 1]
    if not mine or mine[-1].ended is None:
        return attempt
    start = mine[-1]
    return replace(
        attempt,
        state=start.state,
        exit_code=start.exit_code,
        began=attempt.began or start.began,
        ended=max(start.ended or 0.0, attempt.ended or 0.0),
        nodes=start.nodes,
        node_hours=max(start.nodes * start.seconds / 3600, attempt.node_hours),
    )


def _ending(nodes: Sequence[NodeUsage], own: dict[str, Any], again: bool) -> tuple[int | None, str]:
    """Return (exit code, state) as the job script wrote them, otherwise as the nodes did."""
    if own.get("state"):
        return own.get("exit_code"), str(own["state"])
    codes = [node.exit_code for node in nodes if node.exit_code is not None]
    failed = [code for code in codes if code not in (0, EXIT_STOPPED, _TERMINATED)]
    if failed:
        return failed[0], "FAILED"
    if _TERMINATED in codes or not codes or len(codes) < len(nodes):
        return None, KILLED
    if EXIT_STOPPED in codes:
        return EXIT_STOPPED, "REQUEUED" if again else "STOPPED"
    return 0, "COMPLETED"


def _span(folder: Path, nodes: Sequence[NodeUsage]) -> tuple[float | None, float | None, int]:
    """Return (begin, end, number of nodes); without usage files, from the times of the logs."""
    if nodes:
        return min(node.began for node in nodes), max(node.ended for node in nodes), len(nodes)
    logs = [(int(match[1]), path) for path in folder.iterdir() if (match := _OWN_LOGS.match(path.name))]
    times = [path.lstat().st_mtime for _, path in logs]
    return min(times, default=None), max(times, default=None), len({rank for rank, _ in logs})
