"""Entries of a cache: folders that are complete or absent, and stay while a process uses them.

    building = EntryWriter(root, "name")  # a folder with a temporary name
    write_files(building.folder)
    building.publish()                    # now root/name, unless another process was faster
    held = hold(root / "name")            # it stays until held.close()
    building.discard()

Several processes may write one entry at the same time, each in a folder of its own. Every process that uses an entry
holds the lock of a file in it, and so does the one that writes it. The kernel drops a lock however its process ends, so
what a killed process leaves is found and removed. The files are trusted: the folder with the entries must be one that
only this user can write to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import IO

from hpc_rl.system.disk import explained, mount_of
from hpc_rl.system.locks import local_by_mount
from hpc_rl.system.ownership import is_own_folder, weakness
from hpc_rl.system.scratch import remove_tree

LOCK = "lock"
"""Name of the file in an entry that its users lock. Its time is that of the last use."""
DESCRIPTION = "data.json"
"""Name of the file in an entry that describes it: a JSON object, in which `files` are its sources."""
PARTIAL, REMOVED = ".partial", ".removed"
"""Endings of hidden names: an entry that is not complete, and one that is being removed."""
_LOCAL_BY_DEFAULT = ("beegfs",)
"""File systems whose locks reach other nodes only with a setting that no mount shows."""
_UNMARKED_S = 3600
"""Age after which a temporary folder without a lock is abandoned; it gets one within milliseconds."""


def unusable(root: Path, group: int | None = None) -> str | None:
    """Create the folder for entries unless it exists. Return why it cannot be used; None if it can.

    Args:
        group: id of a group whose members this user trusts.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = weakness(root, group)
        if found is not None:
            return f"{found}, so other users could change what is in it"
        with tempfile.TemporaryFile(dir=root):
            return None
    except OSError as error:
        return explained(error, root)


class EntryWriter:
    """A new entry that this process writes.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.folder = root / f".{name}.{secrets.token_hex(4)}{PARTIAL}"
        self._entry = root / name
        self.folder.mkdir(mode=0o700)
        unlocked = self.folder / f"{LOCK}.new"  # another process sees the file when it is locked, not before
        self._lock: IO[str] = unlocked.open("x")
        _flock(self._lock, fcntl.LOCK_SH)
        unlocked.rename(self.folder / LOCK)

    def publish(self) -> None:
        """Give the entry its name. If another process was faster, its entry stays.

        Raises:
            OSError: the file system does not allow it.
        """
        try:
            self.folder.rename(self._entry)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def discard(self) -> None:
        """Let go of the entry if it has its name, and remove it otherwise."""
        self._lock.close()
        remove_tree(self.folder)


def hold(entry: Path) -> IO[str] | None:
    """Keep an entry from being removed until the returned file is closed; None if there is no such entry."""
    return _locked(entry / LOCK, fcntl.LOCK_SH)


def note_use(entry: Path) -> None:
    """Record that an entry is used now."""
    with contextlib.suppress(OSError):
        os.utime(entry / LOCK)


def remove(folder: Path) -> bool:
    """Remove an entry, or what is left of one, unless a process uses it or locks do not show it; return whether it is
    gone."""
    if not locks_reach(folder.parent):
        return not folder.exists()
    if not is_own_folder(folder):  # another user's, or a link
        return not os.path.lexists(folder)
    try:
        lock = _locked(folder / LOCK, fcntl.LOCK_EX)
    except PermissionError:  # another user's
        return False
    if lock is None and not _is_abandoned(folder):
        return not folder.exists()
    doomed = folder.with_name(f".{folder.name.strip('.')}.{secrets.token_hex(4)}{REMOVED}")
    with contextlib.suppress(OSError):
        folder.rename(doomed)
    remove_tree(doomed)
    if lock is not None:
        lock.close()
    return not folder.exists()


def set_aside(entry: Path) -> None:
    """Take the name from a damaged entry, and remove it unless a process uses it."""
    with contextlib.suppress(FileNotFoundError):
        remove(_unnamed(entry))


def discard(entry: Path) -> None:
    """Remove an entry that nobody uses, without asking locks, which some file systems do not have. Several processes
    may do so at the same time. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        remove_tree(_unnamed(entry))


def _unnamed(entry: Path) -> Path:
    """Take the name from an entry, and return its new one."""
    return entry.rename(entry.with_name(f".{entry.name}.{secrets.token_hex(4)}{REMOVED}"))


def sweep(root: Path) -> None:
    """Remove what killed processes left, if locks show that nobody uses it."""
    for ending in (PARTIAL, REMOVED):
        for folder in root.glob(f".*.{'[0-9a-f]' * 8}{ending}"):
            remove(folder)


def locks_reach(root: Path) -> bool:
    """Return whether locks in a folder are seen by all nodes, as far as this machine's mount shows."""
    mounts = Path("/proc/self/mounts").read_text()
    return mount_of(root, mounts)[1] not in _LOCAL_BY_DEFAULT and local_by_mount(root, mounts) is None


def _is_abandoned(folder: Path) -> bool:
    """Return whether this is a folder without a lock, which its process would have created long ago."""
    try:
        return not (folder / LOCK).exists() and time.time() - folder.stat().st_mtime > _UNMARKED_S
    except OSError:
        return False


def _locked(path: Path, how: int) -> IO[str] | None:
    """Open a file and lock it. On a file system without locks, a shared lock is taken to be held, an exclusive one not.

    Returns:
        None if there is no such file, it has just been replaced, or another process has a lock that excludes this one.
    """
    try:
        # A shared lock is held for as long as the data is used, and a file open for writing would keep an administrator
        # from mounting the file system read-only. Network file systems need one for an exclusive lock.
        file = path.open("r" if how == fcntl.LOCK_SH else "r+")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        has_lock = _flock(file, how | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()) and (has_lock or how == fcntl.LOCK_SH):
            return file
    except (BlockingIOError, FileNotFoundError, NotADirectoryError):
        pass
    file.close()
    return None


def _flock(file: IO[str], how: int) -> bool:
    """Lock a file; return False if its file system has no locks. Raises BlockingIOError."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
