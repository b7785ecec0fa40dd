"""Heartbeats of the node entries: each of them replaces a small file in the attempt's folder from time to time.

Node 0 reads the files of all nodes, and every other node reads that of node 0. A node that finds a hang writes this
into its file, with what it has seen, and all nodes answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_rl.node.hangs.process_status import ProcessStatus
from hpc_rl.system.files import read_json, write_atomically

EXCHANGE_S = 10.0
"""Interval between two heartbeats. Each is a small write to the shared file system."""
_LONGEST_STALL = 6
"""A node entry may miss this many heartbeats, whatever trainer.hang_timeout_s is."""


@dataclass(frozen=True)
class NodeHeartbeat:
    """What a node entry has published."""

    count: int = 0
    has_ended: bool = False
    quiet_s: float | None = None
    """For how long its processes have all been waiting; None if one of them works."""
    finds_hang: bool = False
    has_collected: bool = False
    """Whether the finding and the processes are complete."""
    finding: str = ""
    """What it has found, unless the processes show it."""
    processes: tuple[ProcessStatus, ...] = ()
    """Its processes, if there is a hang."""

    def as_json(self) -> str:
        return json.dumps({**self.__dict__, "processes": [one.__dict__ for one in self.processes]})


class NodeHeartbeats:
    """The heartbeats of all nodes, as one of them sees them."""

    def __init__(self, attempt_dir: Path, nodes: Sequence[str], node_rank: int) -> None:
        self._attempt_dir = attempt_dir
        self._nodes = nodes
        self._node_rank = node_rank
        self._count = 0
        self._latest: dict[int, NodeHeartbeat] = {}
        self._silent_s: dict[int, float] = {}

    @property
    def watched(self) -> Iterable[int]:
        """Nodes whose heartbeats this one watches."""
        return range(1, len(self._nodes)) if self._node_rank == 0 else [0]

    def publish(self, heartbeat: NodeHeartbeat) -> None:
        """Replace this node's heartbeat.

        Raises:
            OSError: the shared file system does not take it.
        """
        self._count += 1
        write_atomically(_path(self._attempt_dir, self._node_rank), replace(heartbeat, count=self._count).as_json())

    def look(self, ranks: Iterable[int], elapsed_s: float) -> dict[int, NodeHeartbeat]:
        """Read the heartbeats of some nodes; those that have not published one are left out.

        Args:
            elapsed_s: time since the last look in which this process itself could run.
        """
        found = {rank: beat for rank in ranks if (beat := read_node_heartbeat(self._attempt_dir, rank)) is not None}
        for rank, beat in found.items():
            before = self._latest.get(rank)
            is_new = before is None or before.count != beat.count
            self._silent_s[rank] = 0.0 if is_new else self._silent_s[rank] + elapsed_s
        self._latest |= found
        return found

    def lost(self, hang_timeout_s: float, exchange_s: float) -> dict[int, float]:
        """Return the nodes whose entries have had no heartbeat for too long, and for how many seconds."""
        limit_s = max(hang_timeout_s, _LONGEST_STALL * exchange_s)
        ended = {rank for rank, beat in self._latest.items() if beat.has_ended}
        return {rank: silent for rank, silent in self._silent_s.items() if rank not in ended and silent > limit_s}

    def quiet_s(self, own_s: float | None) -> float | None:
        """Return for how long all processes of all nodes have been waiting; None if one of them may work.

        Args:
            own_s: the same for this node.
        """
        running = {rank: beat for rank, beat in self._latest.items() if not beat.has_ended}
        everybodys = [own_s, *(_add(beat.quiet_s, self._silent_s[rank]) for rank, beat in running.items())]
        known = [seconds for seconds in everybodys if seconds is not None]
        return min(known) if len(known) == len(everybodys) else None


def read_node_heartbeat(attempt_dir: Path, node_rank: int) -> NodeHeartbeat | None:
    """Return the latest heartbeat of a node; None if there is none, or if it cannot be read."""
    found = read_json(_path(attempt_dir, node_rank))
    try:
        return NodeHeartbeat(**{**found, "processes": tuple(ProcessStatus(**one) for one in found["processes"])})
    except (KeyError, TypeError):
        return None


def _add(quiet_s: float | None, since_s: float) -> float | None:
    return None if quiet_s is None else quiet_s + since_s


def _path(attempt_dir: Path, node_rank: int) -> Path:
    return attempt_dir / f".node{node_rank}.heartbeat"
