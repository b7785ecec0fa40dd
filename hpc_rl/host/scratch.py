"""The folder on a node's own disk that holds everything a job leaves there while it runs."""

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
"""Says that the folder is one of these; locked as long as its job lives."""
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.sshfs", "wekafs", "pvfs2")
"""File systems on which a UNIX socket or a lock of one node confuses others."""


def scratch_dir(environ: Mapping[str, str], job_id: str, restart: int, place: int | None) -> Path:
    """Where a job may write on this node: below TMPDIR, where a site or a user has set it, or else below /tmp.

    Args:
        place: the node's rank where several nodes of the job share this machine, else None.
    """
    return local_folder(environ) / f"{os.getuid()}.{job_id}.{restart}{'' if place is None else f'.{place}'}"


def local_folder(environ: Mapping[str, str]) -> Path:
    """A folder on this machine's own disk: TMPDIR, unless it is missing or on a network's file system, or else /tmp."""
    folder = Path(environ.get("TMPDIR") or "/tmp")
    if not folder.is_dir() or file_system(folder, Path("/proc/self/mounts").read_text()) in SHARED:
        return Path("/tmp")
    return folder


@contextlib.contextmanager
def held_scratch(folder: Path) -> Iterator[None]:
    """Make the folder, for its user alone, and remove it at the end.

    Also removes those of jobs of this user that were killed altogether. Their locks tell: the kernel drops them.

    Raises:
        UserError: it cannot be made, or not be removed.
    """
    for mark in folder.parent.glob(f"{os.getuid()}.*/{_MARK}"):
        with contextlib.suppress(OSError), mark.open("rb") as abandoned:
            fcntl.flock(abandoned, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(mark.parent, ignore_errors=True)
    unlocked = folder.with_name(f".{folder.name}")  # so that nobody takes it for abandoned
    try:
        unlocked.mkdir(mode=0o700)
        lock = (unlocked / _MARK).open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(folder)
    except OSError as error:
        raise UserError(f"temporary folder {folder} cannot be made: {error.strerror}") from error
    with lock:
        try:
            yield
        finally:
            removed = remove_scratch(folder)
    if not removed:
        raise UserError(f"temporary folder {folder} cannot be removed from {os.uname().nodename}")


def remove_scratch(folder: Path) -> bool:
    """Remove the folder; whether it is gone. What still writes into it is dying, so that a second look may be due."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while folder.exists() and time.monotonic() < deadline:
        remove_tree(folder)
        if folder.exists():
            time.sleep(0.05)
    return not folder.exists()


def remove_tree(folder: Path) -> None:
    """Remove a folder as far as that is possible, also one whose parts are read-only, as unpacked images have them."""
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            Path(path).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def image_folders(environ: Mapping[str, str], job_id: str) -> list[Path]:
    """What container.sh makes for each task of a job on this machine; there still where it was killed."""
    return list(local_folder(environ).glob(f"{os.getuid()}.{job_id}.image.*"))


def file_system(path: Path, mounts: str) -> str:
    """Type of the file system that holds a path; the longest mount point above it counts (proc(5), mounts)."""
    resolved = path.resolve()
    points = [line.split()[1:3] for line in mounts.splitlines()]
    above = [(point, kind) for point, kind in points if resolved.is_relative_to(point)]
    return max(above, key=lambda found: len(found[0]), default=("/", ""))[1]
