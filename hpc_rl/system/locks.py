"""File locks that reach from node to node, by which the ranks of a job on several nodes meet (flock(2))."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hpc_rl.system.disk import mount_of, mount_options

REMEDY = (
    "put runs on another file system (home folders on NFS have locks), or ask the administrators for them (Lustre: "
    "mount option flock instead of localflock; NFS: without nolock; BeeGFS: tuneUseGlobalFileLocks=true)"
)
_LOCAL = {
    "lustre": {"localflock", "noflock"},
    "nfs": {"nolock", "local_lock=flock", "local_lock=all"},
    "nfs4": {"local_lock=flock", "local_lock=all"},
}
"""Type of a file system -> mount options with which its locks are local to a node, or do not exist."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created. On a file system without locks nothing is held."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def is_locked(path: Path) -> bool:
    """Return whether another process, on any node, holds the lock of a file.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    with path.open("rb+") as file:
        return not try_lock(file)


def try_lock(file: IO[Any]) -> bool:
    """Take the lock of a file and return True, or return False if another process has it.

    Raises:
        OSError: its file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def local_by_mount(path: Path, mounts: str) -> str | None:
    """Return the file system of a path and the option by which its locks do not reach other nodes; None if unknown.

    Args:
        mounts: contents of /proc/self/mounts.
    """
    point, kind = mount_of(path, mounts)
    found = _LOCAL.get(kind, set()) & mount_options(path, mounts)
    return f"{point} ({kind}, mounted with {', '.join(sorted(found))})" if found else None
