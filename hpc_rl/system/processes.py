"""Child processes that never outlive their parent, and signals."""

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

GRACE_S = 15.0
"""Between SIGTERM and SIGKILL. Shorter than Slurm's KillWait (30 s), so that the parent can still report the cause."""
_SIGNAL_S = 60.0
"""Time limit of one wait. Python wakes up much more often in a wait with a limit (subprocess: every 0.05 s)."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TERMINATION = (signal.SIGTERM, signal.SIGINT)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent ends for any reason (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(timeout_s: float = 5.0, kept: Collection[int] = ()) -> None:
    """Kill every process below this one. Call it after the known children have ended.

    Args:
        kept: ids of processes that stay.
    """
    deadline = time.monotonic() + timeout_s
    while (found := set(descendants(os.getpid())).difference(kept)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        time.sleep(0.01)


def descendants(root: int) -> Iterator[int]:
    """Yield the ids of all processes below one, its children first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The program's name, in parentheses, may contain spaces. State and parent follow it (proc(5)).
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = children.get(root, [])
    while found:
        yield from found
        found = [child for pid in found for child in children.get(pid, [])]


def start(
    argv: Sequence[str],
    environ: Mapping[str, str],
    output: IO[bytes],
    new_session: bool = False,
    death: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a child that writes to `output` and ends with this process.

    Args:
        new_session: shield the child from the terminal's Ctrl-C, so that the parent decides what to do.
        death: the signal that the child gets when this process has ended.
    """
    return subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=partial(_begin, death),
        start_new_session=new_session,
    )


def _begin(death: signal.Signals) -> None:
    die_with_parent(death)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINATION)


@contextlib.contextmanager
def deferred_termination() -> Iterator[None]:
    """Defer SIGTERM and SIGINT to the end of the block, but not those of a child that is started in it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINATION)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TERMINATION)


def forward_termination(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> threading.Event:
    """Forward SIGTERM and SIGINT to the child as SIGTERM, and as SIGKILL after `grace_s`.

    Returns:
        an event that is set when such a signal arrives. This process ends after the child: see `wait`.
    """
    asked = threading.Event()

    def forward(_number: int, _frame: FrameType | None) -> None:
        child.terminate()
        if not asked.is_set():
            asked.set()
            kill_later = threading.Timer(grace_s, child.kill)
            kill_later.daemon = True
            kill_later.start()

    for number in _TERMINATION:
        signal.signal(number, forward)
    return asked


def wait(child: subprocess.Popen[bytes]) -> int:
    """Return the child's return code when it has ended.

    Python runs a handler only between two of its own operations. If a signal arrives just before `Popen.wait` sleeps in
    the kernel, its handler would run after the child has ended. With a time limit, it runs soon.
    """
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_SIGNAL_S)


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C. Yields a function that returns whether it was pressed."""
    pressed = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread only
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def end(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """End the child with SIGTERM, and with SIGKILL after `grace_s`."""
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def python_with(package: str, other: str | None) -> str | None:
    """Return this Python if it has the package, or else the other one, which may be None."""
    spec = importlib.util.find_spec(package)
    has_it = spec is not None and spec.origin is not None  # a plain folder of that name has no origin
    return sys.executable if has_it else other


def shell_code(returncode: int) -> int:
    """Return the exit code as a shell shows it: 128 + n if signal n ended the process."""
    return 128 - returncode if returncode < 0 else returncode
