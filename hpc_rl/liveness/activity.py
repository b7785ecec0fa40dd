"""What a command does, in a line on standard error, if its user has seen nothing for two seconds.

The commands switch this on with `shown_activity`. In other programs, `doing` has no effect.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

QUIET = "HPC_RL_QUIET"
"""Variable for programs that read the errors of a command."""
QUIET_S = 2.0
_POLL_S = 0.1


class Activity:
    """What the program is doing now, and when its user has last seen something.

    Args:
        say: shows a line.
        began: time when the program started. All times are seconds of one clock.
    """

    def __init__(self, say: Callable[[str], None], began: float) -> None:
        self._say = say
        self._seen = began
        self._whole: str | None = None
        self._parts: list[tuple[str, float]] = []
        self._said: set[str] = set()

    def is_to(self, what: str) -> None:
        """Receive what the whole program does. It is shown only if the program has printed nothing."""
        self._whole = what

    def begin(self, what: str, at: float) -> None:
        """Receive what the program does now."""
        self._parts.append((what, at))

    def end(self) -> None:
        """End what was begun last."""
        self._parts.pop()

    def printed(self, at: float) -> None:
        """Note that the user has seen something."""
        self._whole, self._seen = None, at

    def check(self, at: float) -> None:
        """Show what the program does, if it is time. Nothing is shown twice."""
        parts, whole = self._parts[-1:], self._whole  # another thread may end a part
        if whole is not None:
            what, since = parts[0][0] if parts else whole, self._seen
        elif parts:
            what, since = parts[0][0], max(parts[0][1], self._seen)
        else:
            return
        if at - since >= QUIET_S and what not in self._said:
            self._said.add(what)
            self._say(what)
            self.printed(at)


_activity: Activity | None = None


@contextmanager
def shown_activity() -> Iterator[None]:
    """Show what this program does while the block runs, except in a pipe that also has its output, or with QUIET."""
    global _activity
    if os.environ.get(QUIET) or _share_a_pipe():
        yield
        return
    errors = sys.stderr  # a call may replace it to collect what a library prints
    _activity, ended = Activity(lambda what: _say(what, errors), _start_of_program()), threading.Event()
    threading.Thread(target=_watch, args=(_activity, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _activity = None


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show what the program does, such as "reading train.jsonl", if its user has then seen nothing for two seconds."""
    activity = _activity if threading.current_thread() is threading.main_thread() else None
    if activity is not None:
        activity.begin(what, time.monotonic())
    try:
        yield
    finally:
        if activity is not None:
            activity.end()


def begin_command(what: str) -> None:
    """Show what the command does as a whole, unless it prints something within two seconds."""
    if _activity is not None:
        _activity.is_to(what)


def printed() -> None:
    """Note that the program has printed something, or waits for its user."""
    if _activity is not None:
        _activity.printed(time.monotonic())


def hide_activity() -> None:
    """Show none from now on: the program has begun to draw on the terminal."""
    global _activity
    printed()
    _activity = None


def _watch(activity: Activity, ended: threading.Event) -> None:
    while not ended.wait(_POLL_S):
        activity.check(time.monotonic())


def _say(what: str, errors: TextIO) -> None:
    with suppress(OSError, ValueError):  # it is closed
        errors.write(f"hpc-rl: {what}\n")


def _share_a_pipe() -> bool:
    """Return whether standard output and errors are the same file or pipe, which another program may read."""
    try:
        out, errors = os.fstat(1), os.fstat(2)
        return os.path.samestat(out, errors) and not os.isatty(2)
    except OSError:  # closed
        return True


def _start_of_program() -> float:
    """Return when this process started, as time.monotonic() counts (proc(5), field 22 of stat)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:  # there is no /proc, or it is hidden
        return time.monotonic()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s
