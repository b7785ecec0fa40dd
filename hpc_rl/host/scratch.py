"""The temporary folder of a job on a node's own disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_rl.errors import UserError

REMOVE_TIMEOUT_S = 5
_MARK = ".hpc-rl"
"""Marks a folder as temporary. The file is locked while the job runs."""
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.sshfs", "wekafs", "pvfs2")
"""Network file systems: UNIX sockets and locks on them may not be local to the node."""


def scratch_dir(environ: Mapping[str, str], job_id: str, restart: int, place: int | None) -> Path:
    """Return the path of the job's temporary folder on this node: below TMPDIR if it is set, or else below /tmp.

    Args:
        place: the node's rank if several nodes of the job share this machine, or else None.
    """
    return local_folder(environ) / f"{os.getuid()}.{job_id}.{restart}{'' if place is None else f'.{place}'}"


def local_folder(environ: Mapping[str, str]) -> Path:
    """Return a folder on this machine's own disk: TMPDIR, or /tmp if TMPDIR is missing or on a network file system."""
    folder = Path(environ.get("TMPDIR") or "/tmp")
    if not folder.is_dir() or file_system(folder, Path("/proc/self/mounts").read_text()) in SHARED:
        return Path("/tmp")
    return folder


@contextlib.contextmanager
def held_scratch(folder: Path) -> Iterator[None]:
    """Create the folder, private to its user, and remove it at the end.

    Also removes the folders of this user's killed jobs, which are recognised by their locks: the kernel releases them.

    Raises:
        UserError: the folder cannot be created or removed.
    """
    for mark in folder.parent.glob(f"{os.getuid()}.*/{_MARK}"):
        with contextlib.suppress(OSError), mark.open("rb") as abandoned:
            fcntl.flock(abandoned, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(mark.parent, ignore_errors=True)
    unlocked = folder.with_name(f".{folder.name}")  # so that another job does not remove it before it is locked
    try:
        unlocked.mkdir(mode=0o700)
        lock = (unlocked / _MARK).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(folder)
    except OSError as error:
        raise UserError(f"temporary folder {folder} cannot be created: {error.strerror}") from error
    with lock:
        try:
            yield
        finally:
            removed = remove_scratch(folder)
    if not removed:
        raise UserError(f"temporary folder {folder} cannot be removed from {os.uname().nodename}")


def remove_scratch(folder: Path) -> bool:
    """Remove the folder and return whether it is gone. It retries while ending processes still write into it."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while folder.exists() and time.monotonic() < deadline:
        remove_tree(folder)
        if folder.exists():
            time.sleep(0.05)
    return not folder.exists()


def remove_tree(folder: Path) -> None:
    """Remove as much of a folder as possible, including read-only parts, which unpacked images contain."""
    if folder.is_symlink():
        return
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            Path(path).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def image_folders(environ: Mapping[str, str], job_id: str) -> list[Path]:
    """Return the folders that container.sh created for a job's tasks on this machine and that are still there."""
    return list(local_folder(environ).glob(f"{os.getuid()}.{job_id}.image.*"))


def file_system(path: Path, mounts: str) -> str:
    """Return the type of the file system of a path: that of the longest mount point above it (proc(5), mounts)."""
    resolved = path.resolve()
    points = [line.split()[1:3] for line in mounts.splitlines()]
    above = [(point, kind) for point, kind in points if resolved.is_relative_to(point)]
    return max(above, key=lambda found: len(found[0]), default=("/", ""))[1]
