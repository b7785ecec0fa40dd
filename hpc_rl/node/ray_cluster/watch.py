"""Waiting for something, while watching all that can end the job meanwhile."""

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
"""How long an end waits for its cause: the node that failed first may be about to say so."""
_SIGTERM_CODE = 128 + signal.SIGTERM


class JobEnd(Exception):
    """The job ends. The text says why, and is empty where another node has said it."""

    def __init__(self, exit_code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def catch_termination() -> threading.Event:
    """Set once Slurm, or the user, has asked this process to end."""
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: asked.set())
    return asked


@dataclass(frozen=True)
class Watch:
    """What both the first node and the others look at all the time."""

    meeting: Meeting
    ray: RayProcess
    asked_to_end: threading.Event

    def check(self) -> None:
        """Raises JobEnd when this node has to end."""
        failure = self.ray.failure()
        if self.asked_to_end.is_set():  # looked at last: Slurm's signal reaches Ray's processes too
            raise self.echo(_SIGTERM_CODE, "")
        if failure:
            raise JobEnd(1, f"{failure} on node {self.node}{self.last_lines(self.meeting.node_rank)}")

    def until(
        self,
        condition: Callable[[], bool],
        check: Callable[[], None],
        deadline: float = math.inf,
        late: Callable[[], str] = str,
    ) -> None:
        """Wait for a condition.

        Args:
            check: raises JobEnd; called several times a second.
            deadline: of time.monotonic().
            late: what is missing, for the error.

        Raises:
            JobEnd: the time is over, or the check says so.
        """
        while not condition():
            check()
            if time.monotonic() > deadline:
                raise JobEnd(1, late())
            time.sleep(POLL_S)

    def lost(self, rank: int, loss: Loss) -> JobEnd:
        """The end for want of another node."""
        reason = f"node {self.meeting.nodes[rank]} is lost: {loss.how}; its log is {self.log(rank)}"
        # Whoever is cut off may say the same of this node.
        return self.echo(1, reason) if loss.machine_answers else JobEnd(1, reason)

    def echo(self, exit_code: int, reason: str) -> JobEnd:
        """The end as another node explains it; where none does within CAUSE_S, the end as given."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            for failure in self.meeting.failures():
                if failure.node_rank != self.meeting.node_rank:
                    return JobEnd(failure.exit_code)
            time.sleep(POLL_S)
        return JobEnd(exit_code, reason)

    @property
    def node(self) -> str:
        return self.meeting.nodes[self.meeting.node_rank]

    def log(self, rank: int) -> Path:
        return self.meeting.attempt_dir / f"node{rank}.log"

    def last_lines(self, rank: int) -> str:
        """The end of a node's log, to be put behind a sentence."""
        lines = tail(self.log(rank))
        return f"; the end of {self.log(rank)}:\n{lines}" if lines else f"; its log is {self.log(rank)}"
