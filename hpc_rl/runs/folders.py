"""The folders of runs: what is in them, and those in which this user has submitted runs.

The latter are the lines of ~/.local/state/hpc-rl/run-folders, the newest first ($XDG_STATE_HOME replaces
~/.local/state: https://specifications.freedesktop.org/basedir-spec/latest/), so that plans learn from the runs of all
projects.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from heapq import nlargest
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.run_dir import MARKS, PIPELINE_MARK, SWEEP_MARK, RunDir
from hpc_rl.system.files import write_atomically
from hpc_rl.system.locks import try_lock
from hpc_rl.system.ownership import is_own_folder, open_own

ROOT = Path("runs")
"""Folder of the runs without --run-dir, below the working folder."""
SUBMISSION = ".submission"
"""File in the folder of a run, sweep or pipeline, which is locked while a command submits or removes it."""
MOST_FOLDERS = 50
"""Folders that are remembered."""
MOST_RUNS = 100
"""Newest runs of all folders that are looked at."""


def remember(folder: Path) -> None:
    """Put a folder, or the one above a sweep or pipeline, at the top of the list. If the list cannot be written, plans
    are less exact."""
    folder = folder.absolute()
    line = str(folder.parent if is_sweep(folder) or is_pipeline(folder) else folder)
    path = _list_file()
    lines = [] if path is None else _lines(path)
    if path is None or lines[:1] == [line] or not line.isprintable():
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        newest = list(dict.fromkeys([line, *lines]))[:MOST_FOLDERS]
        write_atomically(path, "".join(f"{line}\n" for line in newest), forbidden=0o022)


def run_folders() -> list[Path]:
    """Return ./runs, and the other remembered folders that still exist and belong to this user."""
    return list(dict.fromkeys([ROOT.absolute(), *remembered_folders()]))


def newest_runs() -> Iterator[RunDir]:
    """Yield the runs that this user submitted last, of all projects, the newest first."""
    times: dict[Path, float] = {}
    for root in run_folders():
        for path in filter(is_own_folder, runs_below(root)):
            with contextlib.suppress(OSError):  # not submitted
                times[path] = RunDir(path).job.stat().st_mtime
    yield from map(RunDir, nlargest(MOST_RUNS, times, key=lambda path: times[path]))


def is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in MARKS)


def is_sweep(path: Path) -> bool:
    return (path / SWEEP_MARK).is_file()


def is_pipeline(path: Path) -> bool:
    return (path / PIPELINE_MARK).is_file()


def runs_below(root: Path) -> Iterator[Path]:
    """Return every folder below a directory that may be a run, including those of its sweeps and pipelines."""
    return map(Path, _paths_below(root))


def run_paths(root: Path) -> list[str]:
    """Return the paths of all runs below a directory, as text, which is faster if there are thousands of them."""
    return [path for path in _paths_below(root) if _has_any(path, MARKS)]


def _paths_below(root: Path) -> Iterator[str]:
    for path in _folders(str(root)) if root.is_dir() else ():
        if _has_any(path, (SWEEP_MARK, PIPELINE_MARK)):
            yield from _folders(path)
        else:
            yield path


def _has_any(path: str, names: Sequence[str]) -> bool:
    return any(os.path.isfile(f"{path}/{name}") for name in names)  # noqa: PTH113


def _folders(path: str) -> Iterator[str]:
    """Return the folders in a folder, without hidden ones, such as those that are being removed."""
    with os.scandir(path) as entries:
        yield from (entry.path for entry in entries if not entry.name.startswith(".") and entry.is_dir())


@contextlib.contextmanager
def submitting(folder: Path) -> Iterator[None]:
    """Hold the folder of a run or sweep, so that no other command submits or removes it at the same time.

    Raises:
        UserError: another command holds it.
    """
    try:
        lock = open_own(folder.resolve() / SUBMISSION, "a+")
    except OSError as error:
        raise UserError(f"cannot lock {folder.name}: {folder}: {error.strerror}") from error
    with lock:
        try:
            is_there = try_lock(lock) and os.path.samestat(os.fstat(lock.fileno()), (folder / SUBMISSION).stat())
        except FileNotFoundError:  # the other one may just have failed and removed the folder
            is_there = False
        except OSError:  # a file system without locks
            is_there = True
        if not is_there:
            raise UserError(
                f"run {folder.name} is being submitted or removed by another command: wait for it (hpc-rl status)"
            )
        yield


def remembered_folders() -> list[Path]:
    """Return the folders that still exist and belong to this user."""
    path = _list_file()
    return [] if path is None else [folder for line in _lines(path) if is_own_folder(folder := Path(line))]


def _list_file() -> Path | None:
    """Return the path of the list; None if the home folder is unknown."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(state) if state.startswith("/") else Path("~/.local/state").expanduser()
    except RuntimeError:
        return None
    return folder / "hpc-rl" / "run-folders"


def _lines(path: Path) -> list[str]:
    """Return the lines of the list; none if it does not exist, or somebody else can write to it."""
    try:
        with open_own(path) as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
