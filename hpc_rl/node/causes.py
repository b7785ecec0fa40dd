"""Which end of a process is the cause of a job's end, and which ends are its consequences. Pure functions.

Times of different nodes are never compared: their clocks may differ by more than a failure takes to spread. The kinds
of the ends decide first, and then the order in which one node saw them.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum

from hpc_rl.errors import EXIT_STOPPED

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM ended."""

_CONNECTION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|closed by (remote )?peer|"
    r"remote process exited|ncclRemoteError|ncclSystemError|no route to host|network is unreachable|"
    r"Connect timeout|Timed out waiting",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's stores report if another process has gone."""


class Kind(IntEnum):
    """What an end may depend on. An end of a lower kind is never a consequence of one of a higher kind."""

    OWN = 0
    """It failed by itself, somebody killed it, or its node is lost."""
    DEPENDENT = 1
    """It failed, but it uses other processes of the job, which may have failed before: the driver of a Ray job."""
    CONNECTION = 2
    """It lost the connection to another process."""
    TERMINATED = 3
    """It was asked to end."""


@dataclass(frozen=True)
class End:
    """How a process of the job ended, or all processes of a node."""

    node_rank: int
    exit_code: int
    """As a shell shows it: 128 + n if signal n ended the process."""
    kind: Kind = Kind.OWN
    text: str = ""
    """Message for the user; empty if there is nothing to add to what is in the job's log already."""
    process: str = ""
    """Name of the process in messages."""

    @property
    def is_failure(self) -> bool:
        return self.exit_code not in (0, EXIT_STOPPED)

    def to_line(self) -> str:
        """Return the end as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> End:
        found = json.loads(line)
        return cls(**{**found, "kind": Kind(found["kind"])})


def kind_of(exit_code: int, was_asked: bool, last_lines: str) -> Kind:
    """Return the kind of the end of a rank.

    Args:
        was_asked: whether it had been asked to end before.
        last_lines: the end of its log.
    """
    if was_asked:
        return Kind.TERMINATED
    if exit_code == 1 and _CONNECTION.search(last_lines):
        return Kind.CONNECTION
    return Kind.OWN


def first_cause(ends: Iterable[End]) -> End | None:
    """Return the failure that is the cause of the others, or None if there is none.

    Args:
        ends: in the order in which one node saw them.
    """
    return min((end for end in ends if end.is_failure), key=lambda end: end.kind, default=None)


@dataclass(frozen=True)
class Outcome:
    """What the nodes agree on."""

    exit_code: int
    cause: End | None = None
    """The failure that explains the exit code, if it is one."""


def outcome_of(ends: Sequence[End]) -> Outcome:
    """Return the outcome of a job.

    A rank exits with 75 only after all ranks have saved. What is terminated afterwards, or loses its connection, was
    merely slower to end.

    Args:
        ends: one of each node, in the order in which one node saw them.
    """
    cause = first_cause(ends)
    has_saved = any(end.exit_code == EXIT_STOPPED for end in ends)
    if cause is not None and not (has_saved and cause.kind >= Kind.CONNECTION):
        return Outcome(cause.exit_code, cause)
    return Outcome(EXIT_STOPPED if has_saved else 0)
