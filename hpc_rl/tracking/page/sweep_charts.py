"""Plots of several runs: a swept hyperparameter, or the round of a pipeline, against one metric; and their order."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_rl.tracking.page.charts import Figure, PlotGroup
from hpc_rl.tracking.page.plot import Plot, Series
from hpc_rl.tracking.recorded import STAGE, STAGE_KEYS, RecordedRun
from hpc_rl.tracking.summary import result_of

RESULTS = (
    ("eval/score", "Evaluation score", True),
    ("generate/score", "Score", True),
    ("val/score", "Validation reward", True),
    ("critic/score/mean", "Training reward", True),
    ("val/loss", "Validation loss", False),
    ("train/loss", "Training loss", False),
)
"""(metric, name, whether more is better); the first that a run has is its result."""
_MOST_LINES = 8
"""With more combinations of the other hyperparameters, a plot shows their highest, mean and lowest result."""


def is_pipeline(runs: Sequence[RecordedRun]) -> bool:
    """Return whether any of the runs is a stage of a pipeline: they are then shown in the order in which they ran."""
    return any(tuple(run.swept) == STAGE_KEYS for run in runs)


def swept_keys(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the keys that the sweep set, in its order."""
    return list(dict.fromkeys(key for run in runs for key in run.swept))


def best_first(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Order runs by the first metric of RESULTS that any of them has; runs without it come last."""
    for key, _, more_is_better in RESULTS:
        found = {id(run): mean for run in runs if (mean := result_of(run, key)) is not None}
        if found:
            sign = -1 if more_is_better else 1
            return sorted(runs, key=lambda run: (id(run) not in found, sign * found.get(id(run), 0.0)))
    return list(runs)


def sweep_plots(runs: Sequence[RecordedRun]) -> list[PlotGroup]:
    """Return a group per swept key: the mean of each metric's last tenth against the key's values. Of a pipeline, only
    the round is such a key.

    Values are equally spaced in ascending order. Runs that differ in this key only are connected.
    """
    groups = []
    for key in [key for key in swept_keys(runs) if key != STAGE]:
        values = sorted({run.swept[key] for run in runs if key in run.swept}, key=_order)
        figures = [
            Figure(name, f"against {key}", Plot(lines, x=key, categories=values))
            for metric, name, _ in RESULTS
            if (lines := _lines(runs, key, values, metric))
        ]
        groups.append(PlotGroup(key, figures))
    return [group for group in groups if group.figures]


def _lines(runs: Sequence[RecordedRun], key: str, values: Sequence[str], metric: str) -> list[Series]:
    measured: dict[str, dict[float, float]] = {}
    for run in runs:
        mean = result_of(run, metric)
        if key in run.swept and mean is not None:
            others = ", ".join(f"{name.rpartition('.')[2]}={run.swept[name]}" for name in run.swept if name != key)
            measured.setdefault(others, {})[values.index(run.swept[key])] = mean
    if len(measured) > _MOST_LINES:
        return _extremes(list(measured.values()))
    return [Series(others or "runs", sorted(points.items())) for others, points in measured.items()]


def _extremes(measured: Sequence[dict[float, float]]) -> list[Series]:
    places = sorted({place for points in measured for place in points})
    columns = [(place, [points[place] for points in measured if place in points]) for place in places]
    return [
        Series("highest run", [(place, max(found)) for place, found in columns]),
        Series("mean of runs", [(place, sum(found) / len(found)) for place, found in columns]),
        Series("lowest run", [(place, min(found)) for place, found in columns]),
    ]


def _order(value: str) -> tuple[int, float, str]:
    """Order numbers by size, then text alphabetically."""
    try:
        return (0, float(value), "")
    except ValueError:
        return (1, 0.0, value)
