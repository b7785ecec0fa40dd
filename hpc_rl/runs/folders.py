"""The folders in which this user has submitted runs, so that plans learn from the runs of all projects.

They are the lines of ~/.local/state/hpc-rl/run-folders, the newest first ($XDG_STATE_HOME replaces ~/.local/state:
https://specifications.freedesktop.org/basedir-spec/latest/).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from heapq import nlargest
from pathlib import Path

from hpc_rl.host.files import write_atomically
from hpc_rl.host.ownership import is_own_folder, open_own
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import ROOT, runs_below

MOST_FOLDERS = 50
"""Folders that are remembered."""
MOST_RUNS = 100
"""Newest runs of all folders that are looked at."""


def remember(folder: Path) -> None:
    """Put a folder at the top of the list. Nothing is lost if the list cannot be written: plans are less exact."""
    path, line = _list(), str(folder.absolute())
    lines = [line, *_lines(path)] if line.isprintable() else _lines(path)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, "".join(f"{line}\n" for line in list(dict.fromkeys(lines))[:MOST_FOLDERS]))


def run_folders() -> list[Path]:
    """Return ./runs, and the other remembered folders that still exist and belong to this user."""
    others = [path for line in _lines(_list()) if is_own_folder(path := Path(line))]
    return list(dict.fromkeys([ROOT.absolute(), *others]))


def newest_runs() -> Iterator[RunDir]:
    """Yield the runs that this user submitted last, of all projects, the newest first."""
    times: dict[Path, float] = {}
    for root in run_folders():
        for path in runs_below(root):
            with contextlib.suppress(OSError):  # not submitted, or somebody else's
                times[path] = RunDir(path).job.stat().st_mtime
    yield from map(RunDir, nlargest(MOST_RUNS, times, key=lambda path: times[path]))


def _list() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "hpc-rl" / "run-folders"


def _lines(path: Path) -> list[str]:
    """Return the lines of the list; none if it does not exist, or somebody else can write to it."""
    try:
        with open_own(path) as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
