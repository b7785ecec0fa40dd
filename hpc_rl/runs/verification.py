"""Read the checkpoints of runs, and compare them with their checksums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.run_dir import RunDir
from hpc_rl.runs.run_sets import find_run_set
from hpc_rl.runs.status import ROOT, find_run, is_run, runs_below
from hpc_rl.training.checkpoints import folders

INTACT, DAMAGED, UNKNOWN = "intact", "damaged", "unknown"


@dataclass(frozen=True)
class Verified:
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


def verify(runs: Iterable[RunDir]) -> Iterator[Verified]:
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
            yield Verified(path, state, size, reason)
