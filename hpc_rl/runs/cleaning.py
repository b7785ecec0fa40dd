"""Measure the disk usage of runs, and remove old checkpoints or whole runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.host import entries
from hpc_rl.host.files import read_json
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import RunStatus
from hpc_rl.training.checkpoints import folders

DAY_S = 86_400


@dataclass(frozen=True)
class Usage:
    """One run on disk. Sizes in bytes."""

    run: RunDir
    state: str
    active: bool
    checkpoints: int
    model: int
    total: int
    age_s: float
    """Seconds since anything in the run directory changed."""


@dataclass(frozen=True)
class TokenizedData:
    """Tokenized data on disk, which runs share."""

    path: Path
    files: tuple[str, ...]
    size: int
    """Bytes."""
    age_s: float
    """Seconds since a run began to use it."""


@dataclass(frozen=True)
class Removal:
    """A folder to remove, and its size in bytes."""

    path: Path
    size: int


def usage_of(run: RunDir, status: RunStatus, now: float | None = None) -> Usage:
    """Measure a run directory. Files that vanish in the meantime do not count."""
    changed, total = _measure(run.path)
    return Usage(
        run=run,
        state=status.state,
        active=status.active,
        checkpoints=_measure(run.checkpoints)[1],
        model=_measure(run.model)[1],
        total=total,
        age_s=(time.time() if now is None else now) - changed,
    )


def old_checkpoints(found: Iterable[Usage], keep: int) -> list[Removal]:
    """Return the checkpoints of ended runs, except the newest `keep` complete ones of each run.

    Unfinished ones are among them, and those that were set aside when the run resumed from an earlier step.
    """
    removals = []
    for usage in found:
        if usage.active:
            continue
        every = sorted(path for path in usage.run.checkpoints.glob("step-*") if path.is_dir())
        finished = [path for _, path in folders.numbered(usage.run.checkpoints)]
        complete = [path for path in finished if folders.problem_of(path) is None]
        kept = (complete or finished)[:keep]
        removals += [Removal(path, _measure(path)[1]) for path in every if path not in kept]
    return removals


def whole_runs(found: Iterable[Usage]) -> list[Removal]:
    """Return the directories of ended runs."""
    return [Removal(usage.run.path, usage.total) for usage in found if not usage.active]


def older_than(found: Iterable[Usage], days: float) -> list[Usage]:
    """Return the runs in which nothing has changed for this number of days."""
    return [usage for usage in found if usage.age_s > days * DAY_S]


def tokenized_data(root: Path, now: float | None = None) -> list[TokenizedData]:
    """Return the tokenized data in a folder, the largest first.

    Raises:
        UserError: there is no such folder.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder of tokenized data; if your jobs set cache.data_dir, name that folder")
    found = []
    for path in root.glob("[!.]*"):
        with contextlib.suppress(OSError):  # it is gone, is no folder, or belongs to another user
            files = read_json(path / entries.DESCRIPTION).get("files")
            used = (path / entries.LOCK).stat().st_mtime
            if isinstance(files, list):
                age_s = (time.time() if now is None else now) - used
                found.append(TokenizedData(path, tuple(map(str, files)), _measure(path)[1], age_s))
    return sorted(found, key=lambda one: (-one.size, one.path))


def remove_tokenized(found: Sequence[TokenizedData], folders: Iterable[Path]) -> list[TokenizedData]:
    """Remove tokenized data that no run uses, and what killed runs left in its folders. Return what stays."""
    used = [one for one in found if not entries.remove(one.path)]
    for root in folders:
        entries.sweep(root)
    return used


def remove(removals: Sequence[Removal]) -> int:
    """Remove folders and return the number of freed bytes.

    Each folder is renamed first, so that a partly removed one is never read.

    Raises:
        UserError: a folder cannot be removed; those before it have been removed.
    """
    freed = 0
    for removal in removals:
        doomed = removal.path.with_name(f".{removal.path.name}.{os.getpid()}.removed")
        try:
            removal.path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise UserError(f"cannot remove {removal.path}: {error.strerror or error}") from error
        freed += removal.size
    return freed


def _measure(folder: Path) -> tuple[float, int]:
    """Return the Unix time of the last change in a folder, and the size of its files. Hard links count once."""
    changed, total, seen = 0.0, 0, set()
    for path in (folder, *folder.rglob("*")):
        try:
            facts = path.lstat()
        except OSError:
            continue
        changed = max(changed, facts.st_mtime)
        if path.is_file() and not path.is_symlink() and (facts.st_dev, facts.st_ino) not in seen:
            seen.add((facts.st_dev, facts.st_ino))
            total += facts.st_size
    return changed, total
