"""Temporary folders of a job on a node's own disk, for everything that the job writes there."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.system.disk import file_system
from hpc_rl.system.files import write_atomically
from hpc_rl.system.ownership import is_own_folder, keeps_entries, make_writable, open_own, own_folders

REMOVE_TIMEOUT_S = 5
_MARK = ".hpc-rl"
"""Marks a folder as temporary. The file is locked while the folder is in use."""
_SUFFIX_BYTES = 3
"""Random bytes in the name of a folder, each of two characters. Nobody can take all names in advance."""
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "ceph", "fuse.sshfs", "wekafs", "pvfs2")
"""Network file systems: UNIX sockets and locks on them may not be local to the node."""


PLACES = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
"""Local folders of every machine, in the order in which they are tried. The last one is memory."""


def new_name(job_id: str) -> str:
    """Return a name for a temporary folder of a job, which nobody can predict."""
    return f"{os.getuid()}.{job_id}.{secrets.token_hex(_SUFFIX_BYTES)}"


def local_folder(environ: Mapping[str, str]) -> Path:
    """Return a folder on this machine's own disk: TMPDIR if it is one, or else the first of PLACES.

    TMPDIR is not used if other users could replace what is in it, or on a network file system. A folder whose files
    cannot be executed or locked is used only if there is no other.
    """
    safe = [folder for folder in dict.fromkeys((_wanted(environ), *PLACES)) if _is_safe(folder)]
    return next((folder for folder in safe if not unfit(folder)), next(iter(safe), PLACES[0]))


def local_folder_problem(environ: Mapping[str, str]) -> str:
    """Return why files in TMPDIR, or in /tmp without it, cannot be executed or locked, and which folder is used; empty
    if they can."""
    wanted = _wanted(environ)
    problem = unfit(wanted) if _is_safe(wanted) else ""
    chosen = local_folder(environ)
    use = "no other local folder is better" if chosen == wanted else f"{chosen} is used instead"
    return f"files in {wanted} cannot be {problem}: {use}" if problem else ""


def unfit(folder: Path) -> str:
    """Return what files in a folder cannot be: `executed`, as compiled code has to be, or `locked`; empty if they can.

    A folder that cannot be written is not judged.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(mmap.PAGESIZE)
        try:
            mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        except OSError:
            return "executed (the file system is mounted with noexec)"
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"locked ({error.strerror})"
    return ""


def _wanted(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("TMPDIR") or PLACES[0])


def _is_safe(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        is_shared = file_system(folder, Path("/proc/self/mounts").read_text()) in SHARED
        return folder.is_dir() and not is_shared and keeps_entries(folder)
    return False


def programs_tmpdir(environ: Mapping[str, str], scratch: Path) -> str:
    """Return TMPDIR for the programs of a job: the user's, if the job's own folder is in it, or else the job's own.

    A site, or the commands in slurm.setup, may have put files there. /tmp itself is not kept: nobody would remove what
    the programs leave.
    """
    given = environ.get("TMPDIR", "")
    return given if Path(given) == scratch.parent and Path(given) != Path("/tmp") else str(scratch)


@contextlib.contextmanager
def job_scratch(environ: Mapping[str, str], job_id: str, attempt_dir: Path, node_rank: int) -> Iterator[Path]:
    """Create a temporary folder of a job on this node, private to its user, and remove it at the end.

    Its path is recorded in the attempt's folder. The folders of this user's killed jobs are removed too.

    Raises:
        UserError: the folder cannot be created.
    """
    parent = local_folder(environ)
    if problem := local_folder_problem(environ):
        print(f"note: on {os.uname().nodename}, {problem}", flush=True)
    remove_abandoned(own_folders(parent, f"{os.getuid()}.*"))
    folder = parent / new_name(job_id)
    with contextlib.ExitStack() as stack:
        stack.callback(_leave_to_others, folder)  # after the lock is released
        try:
            folder.mkdir(mode=0o700)
            stack.enter_context(marked_in_use(folder))
            write_atomically(_record(attempt_dir, node_rank), str(folder))
        except OSError as error:
            remove_tree(folder)
            raise UserError(f"temporary folder {folder} cannot be created: {error.strerror}") from error
        try:
            yield folder
        finally:
            remove_scratch(folder)


@contextlib.contextmanager
def own_scratch(environ: Mapping[str, str]) -> Iterator[Path]:
    """Create a temporary folder of a process of a job, and remove it at the end.

    If the process is killed, the folder is removed in the same way as the job's own.

    Raises:
        OSError: the folder cannot be created.
    """
    folder = local_folder(environ) / new_name(environ.get("SLURM_JOB_ID", "local"))
    folder.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_tree, folder)  # if it cannot be held
        stack.enter_context(marked_in_use(folder))
        stack.callback(remove_tree, folder)  # while it is held: what a killed process leaves is removed later
        yield folder


def _leave_to_others(folder: Path) -> None:
    """Warn if a folder is still there. It is no error: the job script removes it, or the user's next job on this node,
    which finds the mark."""
    if not is_own_folder(folder):
        return
    with contextlib.suppress(OSError):
        (folder / _MARK).touch(mode=0o600)
    print(f"warning: temporary folder {folder} is still in use on {os.uname().nodename}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def marked_in_use(folder: Path) -> Iterator[None]:
    """Mark a new folder as in use. If this process is killed, the kernel ends that, and the folder is abandoned."""
    unlocked = folder / f"{_MARK}.new"  # another process sees the mark when it is locked, not before
    with os.fdopen(os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as mark:
        with contextlib.suppress(OSError):  # a network file system without locks
            fcntl.flock(mark, fcntl.LOCK_EX)
        unlocked.rename(folder / _MARK)
        yield
    (folder / _MARK).unlink(missing_ok=True)


def remove_abandoned(folders: list[Path]) -> None:
    """Remove those folders of this user that a killed process held."""
    for folder in folders:
        with contextlib.suppress(OSError), open_own(folder / _MARK) as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(folder)


def remove_recorded(attempt_dir: Path, node_rank: int) -> None:
    """Remove the temporary folder that a killed node entry left on this machine, if it did."""
    with contextlib.suppress(OSError):
        remove_scratch(Path(_record(attempt_dir, node_rank).read_text()))


def remove_scratch(folder: Path) -> bool:
    """Remove a folder of this user and return whether it is gone. It retries while ending processes write into it."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while is_own_folder(folder) and time.monotonic() < deadline:
        remove_tree(folder)
        if is_own_folder(folder):
            time.sleep(0.05)
    return not is_own_folder(folder)


def remove_tree(folder: Path) -> None:
    """Remove as much of a folder of this user as possible, with read-only parts, which unpacked images contain.

    Nothing happens to another user's folder, or to the target of a link.
    """
    if not is_own_folder(folder):
        return
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            make_writable(Path(path))
    shutil.rmtree(folder, ignore_errors=True)


def job_folders(environ: Mapping[str, str], job_id: str) -> list[Path]:
    """Return all temporary folders of a job on this machine that are still there, in /tmp and its like too."""
    parents = {local_folder(environ), *PLACES}
    return [folder for parent in sorted(parents) for folder in own_folders(parent, f"{os.getuid()}.{job_id}.*")]


def _record(attempt_dir: Path, node_rank: int) -> Path:
    """Return the file in an attempt's folder that names a node's temporary folder."""
    return attempt_dir / f".node{node_rank}.scratch"
