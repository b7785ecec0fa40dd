"""Processes identified by pid and start time, and waits with a deadline."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

DEADLINE_S = 600.0
"""Deadline of a command or a wait in seconds. It ends what hangs: no test depends on the speed of the machine."""


class SandboxError(RuntimeError):
    """Something in the sandbox did not happen. The message has what was expected and what was found."""


class Process(NamedTuple):
    """A pid with its start time (in clock ticks since boot), because a pid alone may be reused."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        return cls(pid, _stat(pid)[1])

    def is_alive(self) -> bool:
        try:
            state, start = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return start == self.start and state not in "ZX"

    def kill(self) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[str, int]:
    """Return state and start time. The program's name is skipped from the right, because it may contain brackets."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def wait_until(check: Callable[[], bool], what: str, timeout: float, found: Callable[[], str] | None = None) -> None:
    """Poll `check` until it holds.

    Raises:
        SandboxError: the timeout expired. The message has `what` was expected and what was `found`.
    """
    began = asked = time.monotonic()
    while not check():
        now = time.monotonic()
        if now > began + timeout:
            raise SandboxError(f"waited {timeout:g} s for {what}" + (f"; found:\n{found()}" if found else ""))
        time.sleep(max(0.05, 4 * (now - asked)))  # a check that takes long leaves the processors to others
        asked = time.monotonic()
