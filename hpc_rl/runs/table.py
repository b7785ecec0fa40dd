"""All runs at a glance, by a constant number of questions to Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_rl.host.files import read_json
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import RunStatus, below_root, is_run, statuses_of
from hpc_rl.runs.sweeps import SweepDir
from hpc_rl.tracking.history import read_history

_TELLING = ("val/score", "critic/score/mean", "val/loss", "train/loss")
"""Metrics of which the first that a run has last measured stands in the table."""


@dataclass(frozen=True)
class Row:
    """One run."""

    status: RunStatus
    kind: str
    submitted: str
    """ISO 8601; empty for what was never submitted by us."""
    node_hours: float
    sweep: str | None
    values: dict[str, str]
    """What the sweep set: dotted key -> value."""

    @property
    def metric(self) -> tuple[str, float] | None:
        """The last measurement that says most about the run, and its name."""
        measured = self.status.metrics
        return next(((key, measured[key]) for key in _TELLING if measured.get(key) is not None), None)

    def as_dict(self) -> dict[str, Any]:
        own = {"kind": self.kind, "submitted": self.submitted, "node_hours": round(self.node_hours, 4)}
        return {**asdict(self.status), **own, "sweep": self.sweep, "values": self.values}


def all_runs() -> list[Row]:
    """Every run below ./runs, the newest last."""
    found = [RunDir(path.absolute()) for path in below_root() if is_run(path)]
    return sorted(_rows(found), key=lambda row: (row.submitted, row.status.run))


def runs_of(sweep: SweepDir) -> list[Row]:
    """The runs of a sweep, in order."""
    return _rows(sweep.runs())


def _rows(found: Sequence[RunDir]) -> list[Row]:
    sweeps = {folder: SweepDir(folder).values() for folder in {run.path.parent for run in found}}
    rows = []
    for run, status in zip(found, statuses_of(found), strict=True):
        job = read_json(run.job)
        points = sweeps[run.path.parent]
        kind, submitted = str(job.get("kind", "")), str(job.get("submitted", ""))
        sweep = run.path.parent.name if points else None
        values = points[_number(run.path) - 1] if points else {}
        rows.append(Row(status, kind, submitted, read_history(run).node_hours, sweep, values))
    return rows


def _number(path: Path) -> int:
    return int(path.name.rpartition("_")[2])
