"""File systems: free space, and the errors of full and read-only ones."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a file system, or a quota, without free space or without free inodes."""
UNWRITABLE = (*FULL, errno.EROFS, errno.ESTALE, errno.EIO)
"""Errors that writing a file may have because of the file system, whatever the file."""
NEEDED_BYTES = 2**20
"""Space without which no job can write its logs."""
_ALMOST_FULL_BYTES, _ALMOST_FULL_FILES = 64 * 2**20, 100


_OF_ONE_MACHINE = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "overlay", "tmpfs", "ramfs")


@dataclass(frozen=True)
class Space:
    """What is free on a file system, as statvfs(3) reports it. A quota is not part of it."""

    mount: str
    """Mount point."""
    kind: str
    """Type, such as lustre."""
    free_bytes: int
    free_files: int | None
    """Free inodes; None if the file system does not count them."""
    read_only: bool

    def __str__(self) -> str:
        name = f"file system {self.mount} ({self.kind})"
        if self.read_only:
            return f"{name} is read-only"
        files = "" if self.free_files is None else f" and {self.free_files:,} inodes"
        return f"{name} has {_size(self.free_bytes)}{files} free"

    @property
    def problem(self) -> str | None:
        """Why a job cannot write here, or hardly; None if it can."""
        is_short = self.free_files is not None and self.free_files < _ALMOST_FULL_FILES
        return str(self) if self.read_only or is_short or self.free_bytes < _ALMOST_FULL_BYTES else None


def space_of(path: Path) -> Space:
    """Return what is free on the file system of a path, which need not exist.

    Raises:
        OSError: the file system does not answer.
    """
    existing = next(folder for folder in [path, *path.absolute().parents] if folder.exists())
    found = os.statvfs(existing)
    mount, kind = mount_of(existing, Path("/proc/self/mounts").read_text())
    files = found.f_favail if found.f_files else None
    return Space(mount, kind, found.f_bavail * found.f_frsize, files, bool(found.f_flag & os.ST_RDONLY))


def disk_problem(path: Path) -> str | None:
    """Return why a path's file system cannot be written, or hardly; None if it can, or does not answer."""
    try:
        return space_of(path).problem
    except OSError:
        return None


def mount_of(path: Path, mounts: str) -> tuple[str, str]:
    """Return mount point and type of a path's file system: the longest mount point above it (proc(5), mounts)."""
    point, kind, _ = _mount(path, mounts)
    return point, kind


def mount_options(path: Path, mounts: str) -> set[str]:
    """Return the options with which a path's file system is mounted."""
    return set(_mount(path, mounts)[2].split(","))


def _mount(path: Path, mounts: str) -> tuple[str, str, str]:
    """Return mount point, type and options of a path's file system."""
    resolved = path.resolve()
    points = [line.split()[1:4] for line in mounts.splitlines()]
    unescaped = [(point.encode().decode("unicode_escape"), kind, options) for point, kind, options in points]
    above = [found for found in unescaped if resolved.is_relative_to(found[0])]
    # Of several file systems on one point, the last one is visible.
    return max(reversed(above), key=lambda found: len(found[0]), default=("/", "", ""))


def file_system(path: Path, mounts: str) -> str:
    """Return the type of a path's file system; empty if it is not known."""
    return mount_of(path, mounts)[1]


def own_disk(path: Path) -> str:
    """Return mount point and type of a path's file system if it is of a kind that one machine has for itself, and that
    others see only if the machine exports it; empty otherwise. The path need not exist."""
    existing = next(folder for folder in [path, *path.absolute().parents] if folder.exists())
    point, kind = mount_of(existing, Path("/proc/self/mounts").read_text())
    return f"{point} ({kind})" if kind in _OF_ONE_MACHINE else ""


def explained(error: OSError | str, path: Path) -> str:
    """Return an error of writing to a path, and what is free on the path's file system if that may be the reason."""
    reason = error if isinstance(error, str) else error.strerror or str(error)
    if isinstance(error, OSError) and error.errno not in UNWRITABLE:
        return reason
    advice = "; free space or raise your quota" if isinstance(error, OSError) and error.errno in FULL else ""
    try:
        return f"{reason}: {space_of(path)}{advice}"
    except OSError:
        return reason


def refuse_unwritable(folder: Path, what: str) -> None:
    """Check that files can be created in a folder and filled. Quotas show only if something is written.

    Args:
        what: name of the folder for the message.

    Raises:
        UserError: they cannot.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            if probe.write(bytes(NEEDED_BYTES)) < NEEDED_BYTES:  # the rest did not fit
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(probe.fileno())
    except OSError as error:
        raise UserError(f"{what} is not writable: {folder}: {explained(error, folder)}") from error


def tolerate_lost_output() -> None:
    """Let this process go on if its output cannot be written: a full disk must not end what it reports about."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        with contextlib.suppress(OSError):
            getattr(sys, name).flush()
        raw = LossyFile(number)
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True))


class LossyFile(io.RawIOBase):
    """Writes to a file descriptor, and discards what the file system does not accept."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        left = memoryview(data)
        while len(left):
            try:
                left = left[os.write(self._descriptor, left) :]
            except OSError as error:
                if error.errno not in UNWRITABLE:
                    raise
                break
        return len(data)


def _size(count: int) -> str:
    """Return a number of bytes as text: 1.2 GB, 3 MB, 0 bytes."""
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:,} bytes"
