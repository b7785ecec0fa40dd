"""Checks of the folders of a job: whether they can be written, are the user's own, and are seen by the nodes."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from hpc_rl.config.base import MAX_NAME_BYTES, MAX_PATH_BYTES
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.slurm import commands
from hpc_rl.system.disk import own_disk, refuse_unwritable, space_of
from hpc_rl.system.locks import REMEDY, local_by_mount

LONGEST_FILE = "attempt-1000/" + "x" * 64
"""At least as long as any path in a run directory. If this one is below the file system's limit, all of them are."""


def check_run_dir(path: Path, group: str | None = None) -> str | None:
    """Check that a run directory can be created and written by this user, and by nobody else, and that there is space.

    Args:
        group: UNIX group that may read it.

    Returns:
        a warning if its file system has little space or few inodes.

    Raises:
        UserError: its path is impossible, it is below a file, it is not writable, or other users could change it.
    """
    is_long = any(len(os.fsencode(name)) > MAX_NAME_BYTES for name in path.parts)
    if is_long or len(os.fsencode(path / LONGEST_FILE)) > MAX_PATH_BYTES:
        raise UserError(f"run directory {_shortened(path)}: {os.strerror(errno.ENAMETOOLONG)}; choose another one")
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except OSError as error:  # a symbolic link leads to itself
        raise UserError(f"run directory {path}: {error.strerror}; choose another one") from error
    existing = next(folder for folder in [path, *path.parents] if folder.exists())
    if not existing.is_dir():
        raise UserError(f"run directory {path}: {existing} is a file")
    RunDir(path).check_owner(group)
    refuse_unwritable(existing, f"run directory {path}")
    space = space_of(existing)
    return f"run directory {path}: {space}, which is little for a job" if space.problem else None


def check_shared(
    run_dir: Path, working_dir: Path, nodes: commands.NodeListing, output: Path | None = None
) -> str | None:
    """Return a warning if a folder looks like one of this machine alone, on which no jobs run.

    It is no error, because the machine may export its disk to the nodes.

    Args:
        output: folder to which the user's program saves.
    """
    inside = run_dir.is_relative_to(working_dir) and own_disk(run_dir) == own_disk(working_dir)
    asked = [("folder", working_dir)] if inside else [("run directory", run_dir), ("folder", working_dir)]
    if output is not None and own_disk(output) not in (own_disk(path) for _, path in asked):
        asked.append(("the program's output folder", output))
    places = {f"{what} {path}": own_disk(path) for what, path in asked}
    found = {what: place for what, place in places.items() if place}
    with contextlib.suppress(commands.NoAnswer):
        if not found or not nodes.groups() or commands.runs_jobs_here():
            return None
    return "\n".join(
        f"{what} is on {place}, which looks like a disk of this machine alone: if the nodes do not see it, the job "
        "fails without a log (hpc-rl doctor --on-nodes 1 tests it)"
        for what, place in found.items()
    )


def check_locks(path: Path) -> str | None:
    """Return a warning if file locks in a run directory do not reach other nodes, as far as this machine's mount shows.

    The nodes may mount the file system in another way, so this is no error.
    """
    existing = next(folder for folder in [path, *path.parents] if folder.exists())
    found = local_by_mount(existing, Path("/proc/self/mounts").read_text())
    if found is None:
        return None
    return f"run directory {path}: the ranks of several nodes need file locks, which {found} does not have: {REMEDY}"


def _shortened(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-60:]}"
