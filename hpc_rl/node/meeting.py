"""How the nodes of one attempt find each other: small files in the attempt's folder, each written by rename.

Node 0 publishes the rendezvous address; every node says that it is there, and one that fails says with which exit code.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import UserError

POLL_S = 0.05
SHARED_TIMEOUT_S = 20
"""NFS clients look again when the folder above is listed (close-to-open, nfs(5)); this leaves them time for it."""


@dataclass(frozen=True)
class Failure:
    """Why a node ended the job, for the exit codes of the others."""

    node_rank: int
    exit_code: int
    time: float
    """Unix time in seconds: the first failure is the cause, later ones are its echoes."""


@dataclass(frozen=True)
class Meeting:
    attempt_dir: Path
    nodes: tuple[str, ...]
    node_rank: int

    def check_shared(self, timeout_s: float = SHARED_TIMEOUT_S) -> None:
        """Node 0 made the attempt's folder; every other node has to see it.

        Raises:
            UserError: this node does not, so the run directory is not on a shared file system.
        """
        if not _wait(self.attempt_dir.is_dir, timeout_s, refresh=self.attempt_dir.parent):
            raise UserError(
                f"node {self.nodes[self.node_rank]} does not see {self.attempt_dir}, which node {self.nodes[0]} made: "
                "put the run directory on a file system that all nodes share"
            )

    def publish(self, address: str) -> None:
        self._write("rendezvous", address)

    def address(self) -> str | None:
        """`host:port` from node 0, once it is there."""
        with contextlib.suppress(FileNotFoundError):
            list(self.attempt_dir.iterdir())  # makes an NFS client look again
            return (self.attempt_dir / ".rendezvous").read_text()
        return None

    def await_address(self, timeout_s: float) -> str:
        """`host:port` from node 0.

        Raises:
            UserError: none came in time.
        """
        path = self.attempt_dir / ".rendezvous"
        if not _wait(path.exists, timeout_s, refresh=self.attempt_dir):
            raise UserError(
                f"node {self.nodes[self.node_rank]} waited {timeout_s:.0f} s for node {self.nodes[0]} to publish its "
                f"address in {self.attempt_dir}: see node0.log there, or raise slurm.start_timeout_s"
            )
        return path.read_text()

    def arrive(self) -> None:
        self._write(f"node{self.node_rank}.here", "")

    def missing(self) -> list[str]:
        """Names of the nodes that have not arrived yet."""
        seen = {path.name for path in self.attempt_dir.iterdir()}
        return [name for rank, name in enumerate(self.nodes) if f".node{rank}.here" not in seen]

    def fail(self, exit_code: int) -> None:
        """Tell the others, who may be ended by Slurm before they see what happened."""
        failure = Failure(self.node_rank, exit_code, time.time())
        self._write(f"node{self.node_rank}.failed", json.dumps(failure.__dict__))

    def failures(self) -> list[Failure]:
        """Nodes that failed, in the order in which they did."""
        files = self.attempt_dir.glob(".node*.failed")
        return sorted((Failure(**json.loads(file.read_text())) for file in files), key=lambda failure: failure.time)

    def _write(self, name: str, text: str) -> None:
        partial = self.attempt_dir / f".{name}.partial{self.node_rank}"
        try:
            partial.write_text(text)
            partial.replace(self.attempt_dir / f".{name}")
        except OSError as error:
            raise UserError(
                f"node {self.nodes[self.node_rank]} cannot write into {self.attempt_dir}: {error.strerror}"
            ) from error


def named(nodes: Sequence[str]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(nodes)}"


def _wait(condition: Callable[[], bool], timeout_s: float, refresh: Path) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
        with contextlib.suppress(FileNotFoundError):
            list(refresh.iterdir())  # makes an NFS client look again
    return True
