"""Waiting for a condition while watching for everything that can end the job."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpc_rl.node.causes import TERMINATED, End, Kind
from hpc_rl.node.hangs.watch import HangWatch
from hpc_rl.node.peers import Peers
from hpc_rl.node.ray_cluster.processes import RayProcess
from hpc_rl.node.rendezvous import POLL_S, Rendezvous
from hpc_rl.system.files import tail


class JobEnd(Exception):
    """This node's part of the job ends. The text is the reason, and is empty if another process has it."""

    def __init__(self, exit_code: int, reason: str = "", kind: Kind = Kind.OWN) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.kind = kind

    def of(self, node_rank: int) -> End:
        """Return it as the end of a node."""
        return End(node_rank, self.exit_code, self.kind, str(self))


@dataclass(frozen=True)
class Watch:
    """What every node watches all the time."""

    peers: Peers
    ray: RayProcess
    asked_to_end: threading.Event
    hangs: HangWatch

    def check(self) -> None:
        """Check this node, and what the others have sent.

        Raises:
            JobEnd: it has to end.
        """
        self.peers.poll()
        if self.hangs.found:
            raise JobEnd(1)
        failure = self.ray.failure()
        if self.asked_to_end.is_set():  # read after the failure: Slurm's signal reaches Ray's processes too
            raise JobEnd(TERMINATED, kind=Kind.TERMINATED)
        if failure:
            where = f" on node {self.rendezvous.node}{self.last_lines(self.rendezvous.node_rank)}"
            raise JobEnd(failure.exit_code, failure.reason + where)

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

    @property
    def rendezvous(self) -> Rendezvous:
        return self.peers.rendezvous

    def last_lines(self, rank: int) -> str:
        """Return the end of a node's log, as the continuation of a message."""
        log = self.rendezvous.log(rank)
        lines = tail(log)
        return f"; the end of {log}:\n{lines}" if lines else f"; its log is {log}"
