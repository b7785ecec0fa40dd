"""Limits for code that comes with a model, with data or with a response, and that runs in a process of this package."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def cpu_seconds(limit_s: float, what: str) -> Iterator[None]:
    """Interrupt a block that computes for longer than a limit: a template may loop without an end.

    The time is that of the processor, so that a busy machine or a suspended job changes nothing. Only the main thread
    can be interrupted (signal(3)), so that elsewhere there is no limit.

    Raises:
        TimeoutError: the block took longer.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} computed for more than {limit_s:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, interrupt)
    left_s, _ = signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)  # of a block around this one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # the signal would end a process without a handler
        signal.signal(signal.SIGVTALRM, before)
        signal.setitimer(signal.ITIMER_VIRTUAL, left_s)


@contextmanager
def more_memory(limit_bytes: int) -> Iterator[None]:
    """Let a block fail with a MemoryError if it needs more than this beyond what the process has.

    The limit is one of address space (RLIMIT_AS), of all threads of the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = [used + limit_bytes, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
