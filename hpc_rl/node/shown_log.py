"""The log that node 0 shows while the job runs."""

from __future__ import annotations

import time
from pathlib import Path

from hpc_rl.host.files import Follower
from hpc_rl.node.causes import End
from hpc_rl.node.ending import print_cause

LOG_POLL_S = 0.5
"""Interval between reads of the log, which is on a shared file system."""


class ShownLog:
    """Prints a growing log, one read behind: if its process fails because of another one, that cause is printed first.

    Args:
        process: name of the process that writes it, as in `End.process`.
    """

    def __init__(self, path: Path, process: str) -> None:
        self.path = path
        self.process = process
        self._log = Follower(path)
        self._held = ""
        self._next_read = 0.0

    def show(self) -> None:
        """Print what the previous call read, and read what is new."""
        if time.monotonic() >= self._next_read:
            print(self._held, end="", flush=True)
            self._held = self._log.new_text()
            self._next_read = time.monotonic() + LOG_POLL_S

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
