"""Runs on disk: measure their size, verify their checkpoints, and remove old checkpoints or whole runs."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.control import settled_status
from hpc_rl.runs.finding import find_run
from hpc_rl.runs.folders import ROOT, is_pipeline, is_run, is_sweep, runs_below, submitting
from hpc_rl.runs.run_sets import find_run_set
from hpc_rl.runs.status import RunStatus
from hpc_rl.system import entries
from hpc_rl.system.files import read_json
from hpc_rl.system.ownership import is_own_folder
from hpc_rl.system.scratch import remove_tree
from hpc_rl.training.checkpoints import folders

DAY_S = 86_400
INTACT, DAMAGED, UNKNOWN = "intact", "damaged", "unknown"
_REMOVED = ".removed"
_DOOMED = re.compile(rf"\..+\.\d+{re.escape(_REMOVED)}")
"""Name of a folder that is being removed: that of the run or checkpoint, and the id of the process."""


@dataclass(frozen=True)
class DiskUsage:
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
class VerifiedCheckpoint:
    """One checkpoint."""

    path: Path
    state: str
    """intact; damaged; or unknown, if an earlier version wrote it, without checksums."""
    size: int
    """Bytes."""
    problem: str
    """The first file that is not as it was written; empty if all are."""

    def as_dict(self) -> dict[str, Any]:
        return {"path": str(self.path), "state": self.state, "bytes": self.size, "problem": self.problem}


@dataclass(frozen=True)
class Removal:
    """A folder to remove, and its size in bytes."""

    path: Path
    size: int
    run: RunDir | None = None
    """The run that it belongs to; None for what an interrupted removal left."""


def usage_of(run: RunDir, status: RunStatus, now: float | None = None) -> DiskUsage:
    """Measure a run directory. Files that vanish in the meantime do not count."""
    changed, total = _measure(run.path)
    return DiskUsage(
        run=run,
        state=status.state,
        active=status.active,
        checkpoints=_measure(run.checkpoints)[1],
        model=_measure(run.model)[1],
        total=total,
        age_s=(time.time() if now is None else now) - changed,
    )


def old_checkpoints(
    found: Iterable[DiskUsage], keep: int, on_damage: Callable[[str], None] | None = None
) -> list[Removal]:
    """Return the checkpoints of ended runs, except the newest `keep` complete ones of each run.

    Unfinished ones are among them, and those that were set aside when the run resumed from an earlier step.

    Args:
        on_damage: called with a line for each damaged checkpoint, which is not kept if there is an intact one. Those
            that are kept are read for that. None: they are judged by the sizes of their files.
    """
    removals = []
    for usage in found:
        if usage.active:
            continue
        every = sorted(path for path in usage.run.checkpoints.glob("step-*") if path.is_dir())
        finished = [path for _, path in folders.numbered(usage.run.checkpoints)]
        kept = _complete(finished, keep, on_damage if len(every) > 1 else None) or finished[:keep]
        removals += [Removal(path, _measure(path)[1], usage.run) for path in every if path not in kept]
    return removals


def _complete(finished: Iterable[Path], most: int, on_damage: Callable[[str], None] | None) -> list[Path]:
    """Return the first complete checkpoints; see `old_checkpoints`."""
    found: list[Path] = []
    for path in finished:
        if len(found) == most:
            break
        problem = folders.problem_of(path)
        if problem is None and on_damage and (problem := folders.damage_of(path)):
            on_damage(f"{path} is damaged ({problem}), so it does not count as a checkpoint to keep")
        if problem is None:
            found.append(path)
    return found


def whole_runs(found: Iterable[DiskUsage]) -> list[Removal]:
    """Return the directories of ended runs."""
    return [Removal(usage.run.path, usage.total, usage.run) for usage in found if not usage.active]


def leftovers(root: Path, runs: Iterable[RunDir]) -> list[Removal]:
    """Return what interrupted removals left beside runs, in a folder of runs and its sets, and beside checkpoints.

    The folder of runs may be a link, such as one to another disk. Links below it are left alone.
    """
    root = root.resolve()
    beside = [folder for run in runs for folder in (run.path.parent, run.checkpoints)]
    below = [folder.absolute() for folder in (*root.glob("[!.]*"), *beside) if not folder.is_symlink()]
    places = dict.fromkeys([root, *below])
    hidden = {path for folder in places for path in folder.glob(f".*{_REMOVED}")}
    doomed = sorted(path for path in hidden if _DOOMED.fullmatch(path.name) and is_own_folder(path))
    return [Removal(path, _measure(path)[1]) for path in doomed]


def older_than(found: Iterable[DiskUsage], days: float) -> list[DiskUsage]:
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
    for path in filter(is_own_folder, root.glob("[!.]*")):
        with suppress(OSError):  # it is gone
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


def remove(removals: Sequence[Removal], on_used: Callable[[str], None]) -> int:
    """Remove folders and return the number of freed bytes.

    Each folder is renamed first, so that a partly removed one is never read. No link is crossed.

    Args:
        on_used: called with a line for each run that is in use by now; its folders stay.

    Raises:
        UserError: a folder is below a link, or contains what other users own, and nothing is removed; or it cannot be
            removed, and those before it have been.
    """
    for removal in removals:
        if problem := _foreign(removal):
            raise UserError(f"nothing was removed: {problem}")
    freed = 0
    for run, group in groupby(removals, key=lambda removal: removal.run):
        for doomed in group if run is None else _take_names(run, list(group), on_used):
            _remove_tree(doomed.path)
            freed += doomed.size
    return freed


def _take_names(run: RunDir, removals: Sequence[Removal], on_used: Callable[[str], None]) -> list[Removal]:
    """Rename folders of a run, and return them with their new paths; none if the run is in use."""
    with ExitStack() as held:
        try:
            held.enter_context(_unused(run))
        except UserError as error:
            on_used(f"nothing of run {run.name} was removed: {error}")
            return []
        taken: list[Removal] = []
        try:
            for removal in removals:
                taken.append(replace(removal, path=_take_name(removal.path)))
        except UserError:
            for removal, doomed in zip(removals, taken, strict=False):
                doomed.path.rename(removal.path)
            raise
        return taken


def runs_named(target: str | None) -> list[RunDir]:
    """Return the runs of a directory, a sweep or a pipeline, or a single run; without a target, those below ./runs.

    Raises:
        UserError: there is no such run.
    """
    if target is not None and (several := find_run_set(target)):
        return several.runs()
    folder = ROOT if target is None else Path(target)
    if target is not None and (is_run(folder) or not folder.is_dir()):
        return [find_run(target)]
    return [RunDir(path.absolute()) for path in sorted(runs_below(folder)) if is_run(path)]


def verify(runs: Iterable[RunDir]) -> Iterator[VerifiedCheckpoint]:
    """Read every finished checkpoint of some runs, oldest first. One that is removed in the meantime is left out."""
    for run in runs:
        for _, path in reversed(folders.numbered(run.checkpoints)):
            problem, checked = folders.damage_of(path), folders.has_checksums(path)
            files = [file for file in path.rglob("*") if file.is_file()]
            size = sum(file.stat().st_size for file in files if file.exists())
            if not path.exists():
                continue
            state = DAMAGED if problem else INTACT if checked else UNKNOWN
            reason = problem or ("" if checked else "it has no checksums")
            yield VerifiedCheckpoint(path, state, size, reason)


@contextmanager
def _unused(run: RunDir) -> Iterator[None]:
    """Hold a run that no job uses: meanwhile none is submitted, and none starts.

    Raises:
        UserError: a job uses it.
    """
    parent = run.path.parent
    with ExitStack() as held:
        for folder in ([parent] if is_sweep(parent) or is_pipeline(parent) else []) + [run.path]:
            held.enter_context(submitting(folder))
        now = settled_status(run)
        if now.active:
            raise UserError(f"it is {now.state} as job {now.job_id}")
        held.enter_context(run.take_lock())  # last, because a job that starts waits for it only for a moment
        yield


def _foreign(removal: Removal) -> str | None:
    """Return why a folder is not this user's to remove, or None."""
    top = removal.path.parent if removal.run is None else removal.run.path
    between = [removal.path, *removal.path.parents]
    for path in between[: between.index(top) + 1]:
        if path.is_symlink():
            return f"{path} is a link to {path.readlink()}: name the folder itself, or remove the link (rm {path})"
    for path in _folders_in(removal.path):
        if os.path.lexists(path) and not is_own_folder(path):
            return f"{path} belongs to another user, who has to remove it"
    return None


def _folders_in(folder: Path) -> Iterator[Path]:
    """Yield a folder and those in it, each before its contents are looked at. No link is followed."""
    yield folder
    try:
        with os.scandir(folder) as entries:
            inner = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    for path in inner:
        yield from _folders_in(path)


def _take_name(folder: Path) -> Path:
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}{_REMOVED}")
    try:
        return folder.rename(doomed)
    except OSError as error:
        raise UserError(f"cannot remove {folder}: {error.strerror or error}") from error


def _remove_tree(folder: Path) -> None:
    remove_tree(folder)  # another command may be removing it too
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise UserError(f"cannot remove {folder}: {error.strerror or error}") from error


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
