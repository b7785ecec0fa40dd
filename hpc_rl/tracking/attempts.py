"""A run's history, out of its directory alone: its attempts, how they ended, and the node hours that they took."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.host.files import read_json
from hpc_rl.host.usage import NodeUsage, read_spans
from hpc_rl.run_dir import RunDir

KILLED = "KILLED"
"""It was ended from outside: cancelled, queued again by hand, out of time, or its node was lost."""
_TERMINATED = 128 + signal.SIGTERM
"""Of a node that was told to end: the cause lies elsewhere."""
_OWN_LOGS = re.compile(r"node(\d+)[.-]")


@dataclass(frozen=True)
class Attempt:
    """One start of a run's job."""

    number: int
    job_id: str
    state: str
    """RUNNING, COMPLETED, STOPPED, REQUEUED, FAILED, KILLED, or what Slurm calls it."""
    exit_code: int | None
    began: float | None
    """Unix seconds; None for a start that never reached a node."""
    ended: float | None
    """Of its last sign of life."""
    nodes: int
    node_hours: float

    @property
    def seconds(self) -> float:
        return (self.ended or 0.0) - (self.began or 0.0)


@dataclass(frozen=True)
class History:
    attempts: tuple[Attempt, ...]

    @property
    def requeues(self) -> int:
        """How often Slurm started the same job again."""
        return sum(before.job_id == after.job_id != "" for before, after in pairwise(self.attempts))

    @property
    def node_hours(self) -> float:
        return sum(attempt.node_hours for attempt in self.attempts)


def read_history(run: RunDir) -> History:
    """Quick for any run: the first and last line of each node's usage file, and status.json."""
    folders = run.attempts()
    spans = [read_spans(folder) for folder in folders]
    status = read_json(run.status)
    job_ids = [nodes[0].job_id if nodes else "" for nodes in spans]
    attempts = []
    for index, (folder, nodes) in enumerate(zip(folders, spans, strict=True)):
        number = int(folder.name.rpartition("-")[2])
        said = status if status.get("attempt") == number else {}
        job_id = job_ids[index] or str(said.get("job_id", ""))
        again = index + 1 < len(folders) and job_ids[index + 1] == job_id != ""
        exit_code, state = _ending(nodes, said, again)
        began, ended, count = _span(folder, nodes)
        hours = sum(node.hours for node in nodes) if nodes else count * ((ended or 0) - (began or 0)) / 3600
        attempts.append(Attempt(number, job_id, state, exit_code, began, ended, count, hours))
    return History(tuple(attempts))


def ended_with(found: History, exit_code: int, time: float) -> History:
    """The history of a run whose last attempt is about to end like this."""
    if not found.attempts:
        return found
    *before, last = found.attempts
    state = {0: "COMPLETED", EXIT_STOPPED: "STOPPED"}.get(exit_code, "FAILED")
    hours = last.node_hours + last.nodes * (time - (last.ended or time)) / 3600
    last = replace(last, state=state, exit_code=exit_code, ended=time, node_hours=hours)
    return History((*before, last))


def _ending(nodes: Sequence[NodeUsage], said: dict[str, Any], again: bool) -> tuple[int | None, str]:
    """(exit code, state): what the job script said of it, else what its nodes said."""
    if said.get("state"):
        return said.get("exit_code"), str(said["state"])
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
    """(begin, end, nodes); by the times of its logs where nobody wrote down what the nodes used."""
    if nodes:
        return min(node.began for node in nodes), max(node.ended for node in nodes), len(nodes)
    logs = [(int(match[1]), path) for path in folder.iterdir() if (match := _OWN_LOGS.match(path.name))]
    times = [path.stat().st_mtime for _, path in logs]
    return min(times, default=None), max(times, default=None), len({rank for rank, _ in logs})
