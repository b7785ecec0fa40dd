"""All runs of a directory as a table, with a constant number of calls to Slurm; sorted and filtered."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from heapq import nlargest
from pathlib import Path
from typing import Any

from hpc_rl.config.tree import read_options
from hpc_rl.errors import UserError
from hpc_rl.formats.typed_json import STATUS, well_typed
from hpc_rl.run_dir import UNFINISHED, RunDir
from hpc_rl.runs.folders import ROOT, is_run, run_paths
from hpc_rl.runs.run_sets import RunSet, find_run_set, run_set_in
from hpc_rl.runs.status import RunStatus, statuses_of
from hpc_rl.system.files import read_json
from hpc_rl.tracking.evaluations import data_names, model_names
from hpc_rl.tracking.history import read_history

_SHOWN = ("eval/score", "val/score", "critic/score/mean", "generate/score", "val/loss", "train/loss")
"""The table shows the first of these metrics in a run's last record."""
MOST_ENDED = 100
"""The most runs that have ended in a table of recent runs."""
COLUMNS = ("run", "job", "state", "step", "metric", "hours", "lent", "submitted", "kind", "sweep")
"""Columns to sort by, besides metrics (val/loss) and swept keys (optim.lr)."""


@dataclass(frozen=True)
class RunRow:
    """One run."""

    status: RunStatus
    kind: str
    submitted: str
    """ISO 8601; empty for a run that was not submitted by hpc-rl."""
    node_hours: float
    sweep: str | None
    values: dict[str, str]
    """The values that the sweep set: dotted key -> value."""
    lent_hours: float = 0.0
    """Node hours that other jobs lent. They are in the rows of these jobs."""

    @property
    def metric(self) -> tuple[str, float] | None:
        """The name and the last value of the metric that the table shows."""
        measured = self.status.metrics
        return next(((key, measured[key]) for key in _SHOWN if measured.get(key) is not None), None)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The run's configuration as dotted keys; empty if it cannot be read."""
        return read_options(RunDir(Path(self.status.run_dir)).latest_settings)

    def cell(self, column: str) -> Any:
        """Return the value of a column, a metric, a swept key or an option; None if it is null or the run has none."""
        return self._cells.get(column)

    def has(self, column: str) -> bool:
        """Return whether the run has such a column, metric, swept key or option, even if its value is null."""
        return column in self._cells

    @cached_property
    def _cells(self) -> dict[str, Any]:
        own = {
            "run": self.status.run,
            "job": self.status.job_id,
            "state": self.status.state,
            "step": self.status.step,
            "metric": self.metric[1] if self.metric else None,
            "hours": self.node_hours,
            "lent": self.lent_hours,
            "submitted": self.submitted,
            "kind": self.kind,
            "sweep": self.sweep,
        }
        return {**self.options, **self.values, **self.status.metrics, **own}

    @property
    def purpose(self) -> str:
        """The model and the data of an evaluation, or the run of a lender, in short; empty for other runs."""
        if self.status.lends_to:
            return f"lends to {Path(self.status.lends_to).name}"
        model, files = self.options.get("model.path"), self.options.get("data.files")
        if self.kind != "eval" or not isinstance(model, str) or not isinstance(files, list):
            return ""
        return f"{model_names([model])[model]} on {', '.join(data_names(list(map(str, files))).values())}"

    def as_dict(self) -> dict[str, Any]:
        own = {"kind": self.kind, "submitted": self.submitted, "node_hours": round(self.node_hours, 4)}
        lent = {"lent_node_hours": round(self.lent_hours, 4)}
        return {**asdict(self.status), **own, **lent, "sweep": self.sweep, "values": self.values}


def find_rows(target: str | None, recent: bool = False) -> tuple[list[RunRow], int]:
    """Return the runs of a sweep or a pipeline, in order, or of a directory, the newest last. None: those below ./runs.

    Args:
        recent: of the runs of a directory that have ended, return the newest only, without reading the others.

    Returns:
        the rows, and the number of ended runs that are left out.

    Raises:
        UserError: the target is a single run, or does not exist.
    """
    if target is not None and (several := find_run_set(target)):
        return runs_of(several), 0
    found = run_paths((ROOT if target is None else _directory(target)).absolute())
    ended = {path: time for path in found if (time := _ended_at(path)) is not None} if recent else {}
    shown = set(nlargest(MOST_ENDED, ended, key=lambda path: ended[path]))
    rows = _rows([RunDir(Path(path)) for path in found if path in shown or path not in ended])
    return sorted(rows, key=lambda row: row.submitted), len(ended) - len(shown)


def _ended_at(path: str) -> float | None:
    """Return when the newest job of a run directory recorded its end, in Unix seconds; None if it has not, as far as is
    known. The path is text, which is faster if there are thousands of runs."""
    state = well_typed(read_json(f"{path}/status.json"), STATUS).get("state")
    if state is None or state in UNFINISHED:
        return None
    ended = _written_at(f"{path}/status.json")
    return ended if _written_at(f"{path}/job.json") <= ended else None


def _written_at(path: str) -> float:
    """Return when a file was written, in Unix seconds; 0 if there is none."""
    try:
        return os.stat(path).st_mtime  # noqa: PTH116
    except OSError:
        return 0.0


def _directory(target: str) -> Path:
    folder = Path(target)
    if is_run(folder) or is_run(ROOT / target):
        raise UserError(f"{target} is a single run: hpc-rl status {target} shows it")
    if not folder.is_dir():
        raise UserError(f"no directory {target!r}, and no sweep or pipeline of that name in {ROOT.absolute()}")
    return folder


def runs_of(several: RunSet) -> list[RunRow]:
    """Return the runs of a sweep or a pipeline, in order."""
    return _rows(several.runs())


def filtered(rows: Sequence[RunRow], conditions: Sequence[str]) -> list[RunRow]:
    """Return the rows that meet every condition: a state, or KEY=VALUE with a column, a swept key or an option.

    Raises:
        UserError: no run has that key.
    """
    kept = list(rows)
    for condition in conditions:
        key, equals, value = condition.partition("=")
        if not equals:
            key, value = "state", condition
        if rows and not any(row.has(key) for row in rows):
            raise UserError(f"--filter {condition}: no run has {key!r}; give a state, or KEY=VALUE with {_keys()}")
        kept = [row for row in kept if row.has(key) and _is(row.cell(key), value)]
    return kept


def ordered(rows: Sequence[RunRow], column: str, reverse: bool = False) -> list[RunRow]:
    """Sort rows by a column, a metric, a swept key or an option: numbers by size, rows without a value last.

    Raises:
        UserError: no run has that column.
    """
    if rows and not any(row.has(column) for row in rows):
        raise UserError(f"--sort {column}: no run has {column!r}; give {_keys()}")
    valued = [row for row in rows if row.cell(column) is not None]
    rest = [row for row in rows if row.cell(column) is None]
    return sorted(valued, key=lambda row: _order(row.cell(column)), reverse=reverse) + rest


def _keys() -> str:
    return f"one of {', '.join(COLUMNS)}, a metric (val/loss) or an option (optim.lr)"


def _is(found: Any, value: str) -> bool:
    if found is None:
        return value.casefold() == "null"
    return str(found).casefold() == value.casefold() or _order(found) == _order(value)


def _order(value: Any) -> tuple[int, float, str]:
    try:
        return (0, float(value), "")
    except (TypeError, ValueError):
        return (1, 0.0, str(value).casefold())


def _rows(found: Sequence[RunDir]) -> list[RunRow]:
    """Return the rows by name, those of a sweep or pipeline in its order."""
    folders = sorted({run.path.parent for run in found})
    several = [one for folder in folders if (one := run_set_in(folder)) is not None]
    points = {run.path: values for one in several for run, values in zip(one.runs(), one.values(), strict=True)}
    places = {path: (path.parent.name, place) for place, path in enumerate(points)}
    found = sorted(found, key=lambda run: places.get(run.path, (run.name, 0)))
    rows = []
    for run, status in zip(found, statuses_of(found), strict=True):
        job = run.read_job()
        kind, submitted = str(job.get("kind", "")), str(job.get("submitted", ""))
        sweep = run.path.parent.name if run.path in points else None
        history, values = read_history(run), points.get(run.path, {})
        rows.append(RunRow(status, kind, submitted, history.node_hours, sweep, values, history.lent_hours))
    return rows
