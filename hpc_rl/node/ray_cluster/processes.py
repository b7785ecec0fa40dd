"""The Ray processes of this node, as the node entry controls them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from hpc_rl.node.ray_cluster import start
from hpc_rl.node.ray_cluster.start import StartOptions
from hpc_rl.system.files import tail
from hpc_rl.system.processes import die_with_parent, shell_code

TRIES = 3
"""Starts that may fail at once. A slow start is repeated as long as there is time for it."""
SLOW_S = 10.0
END_GRACE_S = 4.0
LAST_LINES = 6
_READ_LINES = 300
_NOISE = re.compile(r"^\s*($|\[state-dump\]|\[[\d-]+ [\d:,]+ [DI] |\*\*\* StackTrace|/\S[^\s(]*\(.*\[0x[0-9a-f]+\])")
"""Lines of Ray's logs that do not name the trouble: levels debug and info, its regular dump of counters, and stacks."""
_NAMES = {"gcs_server": "GCS server", "log_monitor": "log monitor"}
"""Ray's name of a process -> its name in messages."""


class Failure(NamedTuple):
    """Why Ray has ended on a node."""

    reason: str
    exit_code: int
    """As a shell shows it; not 0, because Ray's processes do not end by themselves."""


class RayProcess:
    """A process that imports Ray at once, and becomes a Ray node when it receives its options.

    A failed start is repeated: Ray gives up after 30 s, for example because Python is on a slow file system. The second
    time Python's files are in memory.

    Args:
        log: of the node. It also gets the end of the log of a process of Ray that ended.
        start_timeout_s: time in which slow starts are repeated.
    """

    def __init__(self, environ: Mapping[str, str], log: IO[bytes], start_timeout_s: float) -> None:
        self._environ = dict(environ)
        self._log = log
        self._deadline = time.monotonic() + start_timeout_s
        self._options: bytes | None = None
        self._temp_dir: Path | None = None
        self._failure: Failure | None = None
        self._tries = 0
        self._spawn()

    def begin(self, options: StartOptions) -> None:
        """Start the Ray node."""
        self._options, self._temp_dir = options.as_line().encode(), Path(options.temp_dir)
        self._began = time.monotonic()
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
        self._began = time.monotonic()

    def is_up(self) -> bool:
        """Return whether this node has joined the cluster."""
        self._read()
        return start.UP in self._answers

    def failure(self) -> Failure | None:
        """Return why the node has ended, or None while it runs."""
        if self._failure:
            return self._failure
        self._read()
        code, name = self._child.poll(), ""
        if ended := self._answers.get(start.ENDED):
            name, _, status = ended.partition(" ")
            code, process = int(status), f"Ray's {_NAMES.get(name, name)}"
        elif code is not None:
            process = "the process that runs Ray"
        else:
            return None
        reason = f"{process} {_how(code)}"
        again = self._options is not None and start.UP not in self._answers and self._may_try_again()
        self._log.write(f"hpc-rl: {reason}{' before Ray was up; trying again' if again else ''}\n".encode())
        if name and self._temp_dir:
            self._log.write(last_words(self._temp_dir, name).encode())
        self._log.flush()
        if again and self._options:
            self.end()
            self._spawn()
            self._send(self._options)
            return None
        self._failure = Failure(reason, shell_code(code) or 1)
        return self._failure

    def _may_try_again(self) -> bool:
        now = time.monotonic()
        return self._tries < TRIES or (now - self._began > SLOW_S and now < self._deadline)

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


def last_words(temp_dir: Path, name: str) -> str:
    """Return the last lines about trouble that a process of Ray wrote at its newest start, with the files' names.

    Its reason is often in the .err file alone, which is on the node's own disk. Later starts in a session have files
    with a number: raylet.1.err.
    """
    newest = max(temp_dir.glob("session_2*/logs"), key=_modified, default=temp_dir)
    said = ""
    for kind in ("out", "err"):
        file = max([*newest.glob(f"{name}.{kind}"), *newest.glob(f"{name}.[0-9]*.{kind}")], key=_modified, default=None)
        lines = [line for line in tail(file, _READ_LINES).splitlines() if not _NOISE.match(line)] if file else []
        if file and lines:
            said += "\n".join([f"hpc-rl: the end of Ray's {file.name}:", *lines[-LAST_LINES:], ""])
    return said


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _how(returncode: int) -> str:
    if returncode < 0:
        return f"was killed (signal {-returncode})"
    return f"ended with exit code {shell_code(returncode)}"
