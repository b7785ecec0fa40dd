"""The log that node 0 shows while the job runs."""

from __future__ import annotations

import re
import time
from pathlib import Path

from hpc_rl.node.causes import End
from hpc_rl.node.ending import print_cause
from hpc_rl.system.files import Follower

LOG_POLL_S = 0.5
"""Interval between reads of the log, which is on a shared file system."""
HOLD_S = 20.0
"""How long lines about trouble are held back. A process that fails because of another one takes a while to end, and the
other one's node takes a while to report."""
_TROUBLE = re.compile(r"^.*(Traceback \(most recent call last\)|\w(Error|Exception)\b|\*\*\* SIG)", re.MULTILINE)


class ShownLog:
    """Prints a growing log, one read behind, and lines about trouble later still: if the process fails because of
    another one, that cause is printed first.

    Args:
        process: name of the process that writes it, as in `End.process`.
    """

    def __init__(self, path: Path, process: str) -> None:
        self.path = path
        self.process = process
        self._log = Follower(path)
        self._held = ""
        self._trouble_at: float | None = None
        self._next_read = 0.0

    def show(self) -> None:
        """Print what the previous call read, and read what is new."""
        now = time.monotonic()
        if now >= self._next_read:
            ready = self._ready(now)
            print(self._held[:ready], end="", flush=True)
            self._held = self._held[ready:] + self._log.new_text()
            self._next_read = now + LOG_POLL_S

    def _ready(self, now: float) -> int:
        """Return how many of the held characters may be printed."""
        trouble = _TROUBLE.search(self._held)
        if trouble is None:
            return len(self._held)
        self._trouble_at = now if self._trouble_at is None else self._trouble_at
        if now - self._trouble_at < HOLD_S:
            return trouble.start()
        self._trouble_at = None  # the process goes on
        return len(self._held)

    def show_rest(self) -> None:
        """Print everything that has not been printed yet."""
        print(self._held + self._log.new_text(), end="", flush=True)
        self._held = ""

    def end(self, cause: End | None) -> None:
        """Print the cause of the job's end and the rest of the log: the log first if it shows the cause."""
        is_shown = cause is not None and cause.node_rank == 0 and cause.process == self.process
        if is_shown:
            self.show_rest()
        print_cause(cause)
        self.show_rest()
