"""The folders in which this user has submitted runs, so that plans learn from the runs of all projects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from heapq import nlargest
from pathlib import Path

from hpc_rl.run_dir import RunDir
from hpc_rl.runs import remembered
from hpc_rl.runs.status import ROOT, is_pipeline, is_sweep, runs_below
from hpc_rl.system.files import write_atomically
from hpc_rl.system.ownership import is_own_folder

MOST_FOLDERS = 50
"""Folders that are remembered."""
MOST_RUNS = 100
"""Newest runs of all folders that are looked at."""


def remember(folder: Path) -> None:
    """Put a folder, or the one above a sweep or pipeline, at the top of the list. If the list cannot be written, plans
    are less exact."""
    folder = folder.absolute()
    line = str(folder.parent if is_sweep(folder) or is_pipeline(folder) else folder)
    path = remembered.list_file()
    lines = [] if path is None else remembered.lines(path)
    if path is None or lines[:1] == [line] or not line.isprintable():
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        newest = list(dict.fromkeys([line, *lines]))[:MOST_FOLDERS]
        write_atomically(path, "".join(f"{line}\n" for line in newest), forbidden=0o022)


def run_folders() -> list[Path]:
    """Return ./runs, and the other remembered folders that still exist and belong to this user."""
    return list(dict.fromkeys([ROOT.absolute(), *remembered.folders()]))


def newest_runs() -> Iterator[RunDir]:
    """Yield the runs that this user submitted last, of all projects, the newest first."""
    times: dict[Path, float] = {}
    for root in run_folders():
        for path in filter(is_own_folder, runs_below(root)):
            with contextlib.suppress(OSError):  # not submitted
                times[path] = RunDir(path).job.stat().st_mtime
    yield from map(RunDir, nlargest(MOST_RUNS, times, key=lambda path: times[path]))
