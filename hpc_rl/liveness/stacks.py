"""The stacks of a process, written when another process asks for them by a signal.

Python's faulthandler writes them within the signal handler, in C, so that this works while a thread is blocked in a
library. A thread then calls what else was registered, such as the flight recorder, and marks the end. Slow calls come
after the mark.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 11
"""Slurm, Ray, torch and vLLM do not use it."""
SUFFIX = ".stacks"
END = b"(end of the stacks)\n"

_registered: list[Callable[[], object]] = []
_slow: list[Callable[[], object]] = []


def answer_requests(path: Path) -> None:
    """Have the stacks of all threads appended to a file whenever SIGNAL arrives. Call this in the main thread."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(read, True)
    # Python's own handler writes the number of the signal into the pipe; faulthandler calls it after its own work.
    signal.signal(SIGNAL, lambda _number, _frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    faulthandler.register(SIGNAL, file, all_threads=True, chain=True)
    threading.Thread(target=_finish, args=(read, file), name="stacks", daemon=True).start()


def on_request(call: Callable[[], object], is_slow: bool = False) -> None:
    """Have a function called after the stacks are written, in a thread of its own.

    Args:
        is_slow: whether it is called after the mark, so that the process that has asked does not wait for it.
    """
    (_slow if is_slow else _registered).append(call)


def asked(pid: int) -> bool:
    """Ask a process for its stacks. Return False if it does not answer such requests; the signal would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        if not caught >> (SIGNAL - 1) & 1:
            return False
        os.kill(pid, SIGNAL)
    except (OSError, IndexError, ValueError):
        return False
    return True


def _finish(signals: int, file: int) -> None:
    while numbers := os.read(signals, 1):
        if numbers[0] != SIGNAL:
            continue
        _call(_registered)
        os.write(file, END)
        _call(_slow)


def _call(registered: Sequence[Callable[[], object]]) -> None:
    for call in registered:
        with contextlib.suppress(Exception):  # the stacks matter more
            call()
