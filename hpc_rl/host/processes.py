"""Child processes that never outlive their owner."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

GRACE_S = 15.0
"""Between SIGTERM and SIGKILL: under Slurm's KillWait (30 s), so that the owner still gets to say what happened."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent is gone, however it went (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(timeout_s: float = 5.0) -> None:
    """Kill every process below this one, once the children that it knows have ended."""
    deadline = time.monotonic() + timeout_s
    while (found := list(descendants(os.getpid()))) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        time.sleep(0.01)


def descendants(root: int) -> Iterator[int]:
    """Ids of all processes below one, its children first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The program's name, in parentheses, may hold blanks; then come state and parent (proc(5)).
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = children.get(root, [])
    while found:
        yield from found
        found = [child for pid in found for child in children.get(pid, [])]


def start(
    argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes], new_session: bool = False
) -> subprocess.Popen[bytes]:
    """Start a child that writes to `output` and dies with this process.

    Args:
        new_session: keep the terminal's Ctrl-C from the child, whose owner decides what it means.
    """
    return subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=die_with_parent,
        start_new_session=new_session,
    )


def forward_termination(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> threading.Event:
    """Hand SIGTERM and SIGINT on to the child as SIGTERM, and as SIGKILL after `grace_s`.

    Returns:
        set once such a signal came; this process ends when the child has.
    """
    asked = threading.Event()

    def hand_on(_number: int, _frame: FrameType | None) -> None:
        child.terminate()
        if not asked.is_set():
            asked.set()
            last_word = threading.Timer(grace_s, child.kill)
            last_word.daemon = True
            last_word.start()

    signal.signal(signal.SIGTERM, hand_on)
    signal.signal(signal.SIGINT, hand_on)
    return asked


@contextlib.contextmanager
def held_interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits; whether it came."""
    came = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


def end(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """End the child: SIGTERM, then SIGKILL after `grace_s`."""
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def python_with(package: str, other: str | None) -> str | None:
    """A Python that has the package: this one, or else the other, which may have it; None where neither can."""
    spec = importlib.util.find_spec(package)
    has_it = spec is not None and spec.origin is not None  # a mere folder of that name has no origin
    return sys.executable if has_it else other


def shell_code(returncode: int) -> int:
    """The exit code as a shell shows it: 128 + n for a death by signal n."""
    return 128 - returncode if returncode < 0 else returncode
