"""How the nodes of an attempt find each other: small files in the attempt's folder, each written atomically.

Node 0 publishes addresses. Every node records that it has started, or that it failed before the nodes had met.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.system.files import write_atomically

POLL_S = 0.05
"""Interval between two looks for a file."""
LOOKS_PER_S, LONGEST_POLL_S = 2000, 0.5
"""Looks of all nodes together, which are a load for a shared file system. No interval is longer than LONGEST_POLL_S,
even if that means more looks."""
PROGRESS_S = 30
"""Interval between the lines of Progress."""
SHARED_TIMEOUT_S = 20
"""NFS clients refresh their view if the folder above is listed (close-to-open, nfs(5)). This leaves time for it."""


@dataclass(frozen=True)
class Rendezvous:
    """One node's view of the files by which the nodes of an attempt meet."""

    attempt_dir: Path
    nodes: tuple[str, ...]
    node_rank: int

    @property
    def node(self) -> str:
        """Name of this node."""
        return self.nodes[self.node_rank]

    def log(self, rank: int) -> Path:
        """Return the path of a node's log."""
        return self.attempt_dir / f"node{rank}.log"

    def check_shared(self, timeout_s: float = SHARED_TIMEOUT_S) -> None:
        """Check that this node sees the attempt's folder, which node 0 created.

        Raises:
            UserError: it does not, so the run directory is not on a shared file system.
        """
        if not self._wait(self.attempt_dir.is_dir, timeout_s, refresh=self.attempt_dir.parent):
            raise UserError(
                f"node {self.node} does not see {self.attempt_dir}, which node {self.nodes[0]} made: "
                "put the run directory on a file system that all nodes share"
            )

    def publish(self, address: str) -> None:
        """Publish node 0's `host:port`."""
        self._write("rendezvous", address)

    def address(self) -> str | None:
        """Return node 0's `host:port`, or None if it is not published yet."""
        with contextlib.suppress(FileNotFoundError):
            list(self.attempt_dir.iterdir())  # refreshes the view of an NFS client
            return (self.attempt_dir / ".rendezvous").read_text()
        return None

    def await_address(self, timeout_s: float) -> str:
        """Wait for node 0's `host:port` and return it.

        Raises:
            UserError: it was not published in time.
        """
        return self.await_file(".rendezvous", timeout_s).read_text()

    def await_file(self, name: str, timeout_s: float, check: Callable[[], None] = lambda: None) -> Path:
        """Wait for a file that node 0 publishes, and return its path.

        Args:
            check: called several times a second; raises what ends the wait.

        Raises:
            UserError: it was not published in time.
        """
        path = self.attempt_dir / name

        def is_there() -> bool:
            check()
            return path.exists()

        if not self._wait(is_there, timeout_s, refresh=self.attempt_dir):
            raise UserError(
                f"node {self.node} waited {timeout_s:.0f} s for node {self.nodes[0]} to publish its "
                f"address in {self.attempt_dir}: see node0.log there, or raise slurm.start_timeout_s"
            )
        return path

    def arrive(self) -> None:
        """Record that this node has started."""
        self._write(f"node{self.node_rank}.here", "")

    def missing(self) -> list[str]:
        """Return the names of the nodes that have not started yet."""
        seen = {path.name for path in self.attempt_dir.iterdir()}
        return [name for rank, name in enumerate(self.nodes) if f".node{rank}.here" not in seen]

    def attendance(self) -> str:
        """Return how many nodes have started, and the names of the others."""
        missing, every = self.missing(), len(self.nodes)
        others = f"; {named(missing)} not yet" if missing else ""
        return f"the nodes: {every - len(missing)} of {every} have started{others}"

    def fail(self, exit_code: int) -> None:
        """Record that this node failed and has printed why, for the others. It need not have met them yet."""
        self._write(f"node{self.node_rank}.failed", str(exit_code))

    def failures(self) -> dict[int, int]:
        """Return rank -> exit code of the nodes that have failed and printed why."""
        try:
            there = {path.name for path in self.attempt_dir.iterdir()}  # also refreshes the view of an NFS client
        except FileNotFoundError:
            return {}
        files = {rank: name for rank in range(len(self.nodes)) if (name := f".node{rank}.failed") in there}
        return {rank: int((self.attempt_dir / name).read_text()) for rank, name in files.items()}

    def _wait(self, condition: Callable[[], bool], timeout_s: float, refresh: Path) -> bool:
        deadline, pause_s = time.monotonic() + timeout_s, interval_s(len(self.nodes))
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            with contextlib.suppress(FileNotFoundError):
                list(refresh.iterdir())  # refreshes the view of an NFS client
        return True

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomically(self.attempt_dir / f".{name}", text)
        except OSError as error:
            raise UserError(f"node {self.node} cannot write into {self.attempt_dir}: {error.strerror}") from error


class WaitMessages:
    """Prints from time to time what the job is waiting for."""

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()

    def show(self, what: Callable[[], str]) -> None:
        """Print a line if PROGRESS_S seconds have passed since the last one, or since the beginning."""
        now = time.monotonic()
        if now - self._shown >= PROGRESS_S:
            self._shown = now
            print(f"hpc-rl: waiting for {what()}, {now - self._began:.0f} s", flush=True)


def named(nodes: Sequence[str]) -> str:
    """Return `node a` or `nodes a, b`."""
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(nodes)}"


def interval_s(nodes: int) -> float:
    """Return the interval between a node's looks for a file, when so many nodes look for it."""
    return min(max(nodes / LOOKS_PER_S, POLL_S), LONGEST_POLL_S)
