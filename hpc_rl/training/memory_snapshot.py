"""A snapshot of the GPU's memory when it is full: what is allocated, and by which line of which program.

The file is a pickle that https://docs.pytorch.org/memory_viz shows. Only CUDA's allocator (and ROCm's) records this.
"""

from __future__ import annotations

from pathlib import Path

import torch

MAX_ENTRIES = 20_000
"""Number of the latest allocations and releases that are kept: some KB each in host memory, 2 us each in time
(torch.cuda.memory._record_memory_history)."""

_target: list[Path] = []
"""Where this process writes its snapshot; empty if it records nothing."""


def record(device: torch.device, path: Path | None) -> None:
    """Record allocations of this process from now on.

    Args:
        path: of the snapshot; None to record nothing.
    """
    _target.clear()
    if device.type == "cuda" and path is not None:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_ENTRIES)
        _target.append(path)


def write() -> Path | None:
    """Write the snapshot, and return its path; None if this process records nothing, or the file cannot be written."""
    for path in _target:
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        except OSError:  # the error to report is the lack of memory
            return None
        return path
    return None
