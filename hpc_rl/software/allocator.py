"""The C library's allocator in a process that needs the same large arrays again in each step."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Have this process keep the memory of large arrays that it frees, for those that come after them.

    By default the memory goes back to the kernel, which clears every page again when the next array is written. The
    largest resident size grows, because arrays of different sizes leave gaps. Source: mallopt(3); in a C library
    without it nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
