"""Waiting for a condition while watching for everything that can end the job."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.host.files import tail
from hpc_rl.node.meeting import Meeting
from hpc_rl.node.ray_cluster.processes import RayProcess
from hpc_rl.node.ray_cluster.roll_call import Loss

POLL_S = 0.05
CAUSE_S = 1.0
"""How long a node waits for another node to report the cause of a failure."""
_SIGTERM_CODE = 128 + signal.SIGTERM


class JobEnd(Exception):
    """The job ends. The text is the reason, and is empty if another node has reported it."""

    def __init__(self, exit_code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def catch_termination() -> threading.Event:
    """Return an event that is set when Slurm or the user asks this process to end."""
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: asked.set())
    return asked


@dataclass(frozen=True)
class Watch:
    """What every node watches all the time."""

    meeting: Meeting
    ray: RayProcess
    asked_to_end: threading.Event

    def check(self) -> None:
        """Check this node.

        Raises:
            JobEnd: it has to end.
        """
        failure = self.ray.failure()
        if self.asked_to_end.is_set():  # read after the failure: Slurm's signal reaches Ray's processes too
            raise self.follow(_SIGTERM_CODE, "")
        if failure:
            raise JobEnd(1, f"{failure} on node {self.node}{self.last_lines(self.meeting.node_rank)}")

    def until(
        self,
        condition: Callable[[], bool],
        check: Callable[[], None],
        deadline: float = math.inf,
        late: Callable[[], str] = str,
    ) -> None:
        """Wait until a condition holds.

        Args:
            check: raises JobEnd; called several times a second.
            deadline: of time.monotonic().
            late: returns the error message for the deadline.

        Raises:
            JobEnd: the deadline has passed, or `check` raised it.
        """
        while not condition():
            check()
            if time.monotonic() > deadline:
                raise JobEnd(1, late())
            time.sleep(POLL_S)

    def lost(self, rank: int, loss: Loss) -> JobEnd:
        """Return the end of the job because another node is lost."""
        reason = f"node {self.meeting.nodes[rank]} is lost: {loss.how}; its log is {self.log(rank)}"
        # A node that is cut off from the network may report the same of this node.
        return self.follow(1, reason) if loss.machine_answers else JobEnd(1, reason)

    def follow(self, exit_code: int, reason: str) -> JobEnd:
        """Return the end as another node reports its cause, or as given if none does within CAUSE_S."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            for failure in self.meeting.failures():
                if failure.node_rank != self.meeting.node_rank:
                    return JobEnd(failure.exit_code)
            time.sleep(POLL_S)
        return JobEnd(exit_code, reason)

    @property
    def node(self) -> str:
        """Name of this node."""
        return self.meeting.nodes[self.meeting.node_rank]

    def log(self, rank: int) -> Path:
        """Return the path of a node's log."""
        return self.meeting.attempt_dir / f"node{rank}.log"

    def last_lines(self, rank: int) -> str:
        """Return the end of a node's log, as the continuation of a message."""
        lines = tail(self.log(rank))
        return f"; the end of {self.log(rank)}:\n{lines}" if lines else f"; its log is {self.log(rank)}"
