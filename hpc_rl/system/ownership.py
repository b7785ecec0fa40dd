"""Files and folders that nobody but this user can have written or can replace.

Folders such as /tmp are shared: any user can create a file, a FIFO or a symbolic link of any name there. What is found
in them is therefore opened and removed only through this module.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from hpc_rl.errors import UserError

_trusted_groups: set[int] = set()
"""Ids of the groups that the user has named in slurm.group."""
_MODES = {"r": os.O_RDONLY, "a+": os.O_RDWR | os.O_APPEND | os.O_CREAT}
_MOST_LINKS = 40
"""Symbolic links in one path; Linux follows as many (path_resolution(7))."""
_ANY_ID = 2**32 - 1
_ACL = "system.posix_acl_access"
"""The access control list of a file (acl(5)), as Linux stores it: a version, and entries of tag, permissions and id."""
_ACL_VERSION_BYTES, _ACL_ENTRY = 4, struct.Struct("<HHI")
_ACL_USER, _ACL_GROUP, _ACL_WRITE = 0x02, 0x08, 0x02


def open_own(path: Path, mode: str = "r") -> IO[str]:
    """Open a regular file of this user in a folder of this user, neither of them through a symbolic link.

    It never blocks, as opening another user's FIFO would.

    Args:
        mode: "r", or "a+" to create the file (0600) if it is missing.

    Raises:
        OSError: there is no such file, or it may be another user's work.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _expect(os.fstat(folder).st_uid == os.geteuid(), path.parent, "belongs to another user")
        file = os.open(path.name, _MODES[mode] | flags, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        found = os.fstat(file)
        _expect(stat.S_ISREG(found.st_mode), path, "is not a regular file")
        _expect(found.st_uid == os.geteuid(), path, "belongs to another user")
        _expect(found.st_nlink == 1, path, "has several names (hard links)")
        _expect(not others_write(file), path, "can be changed by other users")
        return os.fdopen(file, mode)
    except BaseException:
        os.close(file)
        raise


def own_folders(parent: Path, pattern: str) -> list[Path]:
    """Return the real folders of this user in a folder that others may write to, by a pattern of their names."""
    return sorted(path for path in parent.glob(pattern) if is_own_folder(path))


def is_own_folder(path: Path) -> bool:
    """Return whether this is a folder, not a link, of this user."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def private_folder(path: Path) -> bool:
    """Create a folder unless it exists, and return whether it is this user's alone (mode 0700, no link)."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        return is_own_folder(path) and not path.lstat().st_mode & 0o077
    return False


def make_writable(path: Path) -> None:
    """Give this user all permissions for a folder of its own, and leave everything else as it is.

    Raises:
        OSError: this is no folder, or a symbolic link.
    """
    folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid == os.geteuid():
            Path(f"/proc/self/fd/{folder}").chmod(0o700)  # fchmod(2) does not accept such a descriptor
    finally:
        os.close(folder)


def keeps_entries(folder: Path) -> bool:
    """Return whether no other user can replace this user's entries of a folder: /tmp is safe by its sticky bit."""
    found = folder.stat()
    return _is_trusted(found.st_uid) and (not others_write(folder) or bool(found.st_mode & stat.S_ISVTX))


def others_write(at: Path | int) -> bool:
    """Return whether others can write: everybody, a group with members other than this user, or a user that is listed.

    With an access control list, the permissions of the group are the most that any entry of the list can give (acl(5)).

    Args:
        at: a path or a file descriptor.
    """
    found = os.stat(at)  # noqa: PTH116  # a file descriptor, too
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and (not _is_group_of_one(found.st_gid) or _listed_write(at))


def weakness(path: Path, group: int | None = None) -> str | None:
    """Return how another user could write to a folder of this user or replace it, or None.

    Every folder and symbolic link on the way to it is examined. If the folder does not exist, those that do count.

    Args:
        group: id of a group whose members this user trusts.
    """
    try:
        if found_above := _open_above(path, set() if group is None else {group}):
            return found_above
    except FileNotFoundError:
        return None
    found = path.stat()
    if found.st_uid != os.geteuid():
        return f"it belongs to {_user(found.st_uid)}"
    if others_write(path):
        return f"it can be changed by {_writers(path)}"
    return None


def trust_group(name: str) -> None:
    """Accept the work of a UNIX group's members in `refuse_foreign`, as the user has requested with slurm.group."""
    with contextlib.suppress(KeyError):
        _trusted_groups.add(grp.getgrnam(name).gr_gid)


def refuse_foreign(what: str, path: Path) -> None:
    """Refuse a file that a command found relative to the working folder, and would follow or run, unless it is this
    user's or root's, and nobody else could change or replace it. Every folder and link on the way is examined.

    Args:
        what: the file as the message names it.

    Raises:
        UserError: another user may have written it.
    """
    try:
        found = _open_above(path, _trusted_groups) or _foreign(path)
    except OSError as error:
        raise UserError(f"{what}: {path}: {error.strerror or error}") from error
    if found is not None:
        raise UserError(
            f"{what} is not used, because it could be the work of another user: {found}. Copy it into a folder that "
            "only you can change (or run chmod go-w), or set slurm.group in ~/.config/hpc-rl/site.yaml to the group "
            "that you share the folder with"
        )


def _foreign(path: Path) -> str | None:
    found = path.stat()
    trusted = found.st_gid in _trusted_groups
    if not _is_trusted(found.st_uid) and not trusted:
        return f"{path} belongs to {_user(found.st_uid)}"
    if others_write(path) and not (trusted and not found.st_mode & stat.S_IWOTH):
        return f"{path} can be changed by {_writers(path)}"
    return None


def _open_above(path: Path, groups: Collection[int]) -> str | None:
    """Return how another user could replace a path: by a folder or a symbolic link on the way to it; or None.

    Args:
        groups: ids of groups whose members this user trusts.

    Raises:
        FileNotFoundError: nothing is wrong with the folders, and the path does not exist.
    """
    for folder, entry in _way(path):
        above = folder.stat()
        trusted = above.st_gid in groups
        if not _is_trusted(above.st_uid) and not trusted:
            return f"{folder} belongs to {_user(above.st_uid)}"
        open_to_others = others_write(folder) and not (trusted and not above.st_mode & stat.S_IWOTH)
        if open_to_others and not above.st_mode & stat.S_ISVTX:
            return f"{folder} can be changed by {_writers(folder)}"
        found = entry.lstat()
        if (open_to_others or stat.S_ISLNK(found.st_mode)) and not _is_trusted(found.st_uid):
            return f"{entry} belongs to {_user(found.st_uid)}"
    return None


def foreign_entry(folder: Path) -> str | None:
    """Return what another user has put into a folder of this user (a file, folder or link), with its owner; or None.

    A user namespace shows root like any other user, so that root's entries count as foreign there.
    """
    for name in sorted(os.listdir(folder)):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError):
            owner = (folder / name).lstat().st_uid
            if owner not in (0, os.geteuid()):
                return f"{name}, which belongs to {_user(owner)}"
    return None


def _way(path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each (folder, entry of it) that the kernel passes on the way to a path, links' targets included.

    Raises:
        OSError: there are too many links.
    """
    at, names, links = Path("/"), list(path.absolute().parts[1:]), 0
    while names:
        name = names.pop(0)
        if name == "..":
            at = at.parent
            continue
        entry = at / name
        yield at, entry
        if not entry.is_symlink():
            at = entry
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(f"too many symbolic links on the way to {path}")
        target = entry.readlink()
        at = Path("/") if target.is_absolute() else at
        names = [*target.parts[target.is_absolute() :], *names]


def _is_trusted(uid: int) -> bool:
    """Return whether a user is this one or root. A user namespace shows root as an overflow id (user_namespaces(7))."""
    if uid in (0, os.geteuid()):
        return True
    maps = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    shows_all = sum(int(count) for *_, count in maps) >= _ANY_ID
    return not shows_all and uid == int(Path("/proc/sys/fs/overflowuid").read_text())


def _is_group_of_one(gid: int) -> bool:
    """Return whether a group is the private group of this user: it has the user's name and no other member."""
    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    others = {user.pw_name for user in pwd.getpwall() if user.pw_gid == gid} | set(group.gr_mem)
    return group.gr_name == name and others <= {name}


def _listed_write(at: Path | int) -> bool:
    """Return whether an access control list names another user, or a group with other members, that may write."""
    try:
        entries = os.getxattr(at, _ACL)[_ACL_VERSION_BYTES:]
    except OSError:  # there is no list, or the file system has none
        return False
    return any(
        bool(permissions & _ACL_WRITE)
        and ((tag == _ACL_USER and not _is_trusted(who)) or (tag == _ACL_GROUP and not _is_group_of_one(who)))
        for tag, permissions, who in _ACL_ENTRY.iter_unpack(entries)
    )


def _expect(holds: bool, path: Path, problem: str) -> None:
    if not holds:
        raise PermissionError(0, problem, str(path))


def _writers(path: Path) -> str:
    found = path.stat()
    if found.st_mode & stat.S_IWOTH:
        return "all users"
    if _listed_write(path):
        return "users in its access control list (getfacl)"
    try:
        return f"group {grp.getgrgid(found.st_gid).gr_name}"
    except KeyError:
        return f"group {found.st_gid}"


def name_user() -> None:
    """Give a user id without an entry in the user database a name for this process and the jobs that it starts.

    Containers and nodes whose sssd is down have such users. Libraries ask for the name (`getpass.getuser`).

    Raises:
        UserError: nothing states the home folder.
    """
    uid = os.getuid()
    try:
        pwd.getpwuid(uid)
    except KeyError:
        if not os.environ.get("HOME"):
            raise UserError(
                f"user id {uid} has no entry in the user database of this machine, and HOME is not set: set HOME to "
                "your home folder"
            ) from None
        if not any(os.environ.get(name) for name in ("LOGNAME", "USER")):
            os.environ["LOGNAME"] = f"uid{uid}"


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
