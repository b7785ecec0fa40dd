"""The Ray processes of this node, as the entry sees them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from hpc_rl.host.processes import die_with_parent, shell_code
from hpc_rl.node.ray_cluster import start
from hpc_rl.node.ray_cluster.start import Orders

TRIES = 3
END_GRACE_S = 4.0
_NAMES = {"gcs_server": "GCS server", "log_monitor": "log monitor"}
"""Ray's names of its processes, where people say it otherwise."""


class RayProcess:
    """Starts at once and imports Ray; becomes a Ray node when it gets its orders.

    A start that fails is tried again: a raylet gives up when its agents take over 15 s, as they may where Python comes
    from a slow file system or cores are scarce, and the second time they are in memory.
    """

    def __init__(self, environ: Mapping[str, str], log: IO[bytes]) -> None:
        self._environ = dict(environ)
        self._log = log
        self._line: bytes | None = None
        self._tries = 0
        self._spawn()

    def begin(self, orders: Orders) -> None:
        self._line = orders.as_line().encode()
        self._order(self._line)

    def _spawn(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "hpc_rl.node.ray_cluster.start"],
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            preexec_fn=die_with_parent,
        )
        assert self._child.stdin and self._child.stdout
        self._orders, self._answers = self._child.stdin, self._child.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._half_line = b""
        self._said: dict[str, str] = {}
        self._tries += 1

    def is_up(self) -> bool:
        """Whether the cluster knows this node."""
        self._read()
        return start.UP in self._said

    def failure(self) -> str | None:
        """Why the node is no more, or None while it is."""
        self._read()
        code = self._child.poll()
        if ended := self._said.get(start.ENDED):
            name, _, status = ended.partition(" ")
            reason = f"Ray's {_NAMES.get(name, name)} {_how(int(status))}"
        elif code is not None:
            reason = f"the process that runs Ray {_how(code)}"
        else:
            return None
        if self._line and start.UP not in self._said and self._tries < TRIES:
            self._log.write(f"hpc-rl: {reason} before Ray was up; trying again\n".encode())
            self._log.flush()
            self.end()
            self._spawn()
            self._order(self._line)
            return None
        return reason

    def ask_timeline(self, path: Path) -> None:
        self._order(f"{start.TIMELINE} {path}\n".encode())

    def timeline_answer(self) -> str | None:
        """What went wrong with the timeline ("" for nothing), or None as long as it is being written."""
        self._read()
        return self._said.get(start.TIMELINE)

    def end(self) -> None:
        """End it and its processes."""
        self._child.terminate()
        try:
            self._child.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self._answers.close()

    def _order(self, line: bytes) -> None:
        try:
            self._orders.write(line)
            self._orders.flush()
        except BrokenPipeError:  # it has ended, which failure() tells
            return

    def _read(self) -> None:
        try:
            while new := os.read(self._answers.fileno(), 4096):
                *lines, self._half_line = (self._half_line + new).split(b"\n")
                for line in lines:
                    word, _, rest = line.decode().partition(" ")
                    self._said.setdefault(word, rest)
        except BlockingIOError:
            return


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"was killed (signal {-returncode})"
    return f"ended with exit code {shell_code(returncode)}"
