"""The cgroups of this process, and the processes that the kernel killed in them for lack of memory (cgroups(7))."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_COUNTERS = ("memory.events", "memory.oom_control")
"""Files with a line `oom_kill NUMBER`, in version 2 and 1."""


def own_cgroups(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """Yield the folders of this process's cgroups and their parents, the nearest first. Each of them may set a limit.

    Inside a container a hierarchy may be mounted from below its root, or not as far as this process's cgroup. Then the
    existing parents count.
    """
    roots = _mounted_roots(proc)
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            top = cgroups / name
            root = roots.get(os.path.realpath(top), "/")
            inside = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path(path.lstrip("/"))
            below = top / inside
            yield from (folder for folder in [below, *below.parents] if folder.is_relative_to(top) and folder.is_dir())


def oom_kills(groups: Iterable[Path]) -> int | None:
    """Return how many processes of a cgroup the kernel has killed for lack of memory; None if it has no counter.

    Args:
        groups: as `own_cgroups` returns them. The first one with a counter decides: those above it may count processes
            of other jobs.
    """
    for group in groups:
        for name in _COUNTERS:
            with contextlib.suppress(OSError):
                fields = dict(line.split(" ", 1) for line in (group / name).read_text().splitlines())
                if "oom_kill" in fields:
                    return int(fields["oom_kill"])
    return None


def _mounted_roots(proc: Path) -> dict[str, str]:
    """Return mount point -> the folder of the file system that is mounted there (proc(5), mountinfo)."""
    try:
        lines = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return {}
    return {fields[4]: fields[3] for fields in map(str.split, lines)}  # of several on one point, the last is visible
