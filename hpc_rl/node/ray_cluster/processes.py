"""The Ray processes of this node, as the node entry controls them."""

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
from hpc_rl.node.ray_cluster.start import StartOptions

TRIES = 3
END_GRACE_S = 4.0
_NAMES = {"gcs_server": "GCS server", "log_monitor": "log monitor"}
"""Ray's name of a process -> its name in messages."""


class RayProcess:
    """A process that imports Ray at once, and becomes a Ray node when it receives its options.

    A failed start is repeated: a raylet gives up if its agents take longer than 15 s, for example because Python is on
    a slow file system. The second time Python's files are in memory.
    """

    def __init__(self, environ: Mapping[str, str], log: IO[bytes]) -> None:
        self._environ = dict(environ)
        self._log = log
        self._options: bytes | None = None
        self._tries = 0
        self._spawn()

    def begin(self, options: StartOptions) -> None:
        """Start the Ray node."""
        self._options = options.as_line().encode()
        self._send(self._options)

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
        self._commands, self._output = self._child.stdin, self._child.stdout
        os.set_blocking(self._output.fileno(), False)
        self._incomplete = b""
        self._answers: dict[str, str] = {}
        self._tries += 1

    def is_up(self) -> bool:
        """Return whether this node has joined the cluster."""
        self._read()
        return start.UP in self._answers

    def failure(self) -> str | None:
        """Return why the node has ended, or None while it runs."""
        self._read()
        code = self._child.poll()
        if ended := self._answers.get(start.ENDED):
            name, _, status = ended.partition(" ")
            reason = f"Ray's {_NAMES.get(name, name)} {_how(int(status))}"
        elif code is not None:
            reason = f"the process that runs Ray {_how(code)}"
        else:
            return None
        if self._options and start.UP not in self._answers and self._tries < TRIES:
            self._log.write(f"hpc-rl: {reason} before Ray was up; trying again\n".encode())
            self._log.flush()
            self.end()
            self._spawn()
            self._send(self._options)
            return None
        return reason

    def ask_timeline(self, path: Path) -> None:
        """Have the timeline of the job written to a file."""
        self._send(f"{start.TIMELINE} {path}\n".encode())

    def timeline_answer(self) -> str | None:
        """Return the error of the timeline, an empty text for success, or None while it is being written."""
        self._read()
        return self._answers.get(start.TIMELINE)

    def end(self) -> None:
        """End the process and its children."""
        self._child.terminate()
        try:
            self._child.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        self._output.close()

    def _send(self, line: bytes) -> None:
        try:
            self._commands.write(line)
            self._commands.flush()
        except BrokenPipeError:  # it has ended, which failure() reports
            return

    def _read(self) -> None:
        try:
            while new := os.read(self._output.fileno(), 4096):
                *lines, self._incomplete = (self._incomplete + new).split(b"\n")
                for line in lines:
                    word, _, rest = line.decode().partition(" ")
                    self._answers.setdefault(word, rest)
        except BlockingIOError:
            return


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"was killed (signal {-returncode})"
    return f"ended with exit code {shell_code(returncode)}"
