"""The data of a plot, as the page's script reads it: long series become bins of equal size with minimum, mean, maximum.

The page draws with uPlot (page/uplot-*.min.js). All plots share one table of x values, so that no column is in the file
twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.tracking.formatting import number

MOST_BINS = 500
"""Points of a drawn line. A plot is about 600 pixels wide."""
FEWEST_BINS = 20
_MOST_AREA_BINS = 150
_ALL_BINS = 30_000
"""Bins of all lines of a page: with more lines, each has fewer."""
_MOST_BANDS = 4
"""A plot with more lines than that shows means without bands, which would hide each other."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a plot."""

    name: str
    points: Sequence[Point]
    """(x, value), x ascending, values finite."""
    style: int | None = None
    """Index of colour and dash pattern; None: the position among the plot's series."""


@dataclass(frozen=True)
class Plot:
    """Lines over a common x axis."""

    series: Sequence[Series]
    x: str = "step"
    """The unit of the x axis. Plots with the same unit share cursor and zoom."""
    from_zero: bool = False
    """Start the value axis at 0, for amounts; otherwise at the smallest value."""
    marks: Sequence[float] = ()
    """Positions of dashed upright lines."""
    stacked: bool = False
    """Areas on top of each other. All series have the same x values."""
    categories: Sequence[str] = ()
    """Labels of the x values 0, 1, ...; empty for a numeric axis."""

    def styles(self) -> list[int]:
        return [index if one.style is None else one.style for index, one in enumerate(self.series)]

    def spoken(self) -> str:
        """Describe the plot for screen readers."""
        return "; ".join(f"{s.name} {number(s.points[0][1])} to {number(s.points[-1][1])}" for s in self.series)


@dataclass(frozen=True)
class Bin:
    """Neighbouring points as one: their mean x, and their smallest, mean and largest value."""

    x: float
    low: float
    mean: float
    high: float


def binned(points: Sequence[Point], most: int) -> list[Bin]:
    """Merge equal runs of points until at most `most` are left; a short series is unchanged."""
    size = max(1, -(-len(points) // most))
    return [_bin(points[i : i + size]) for i in range(0, len(points), size)]


def plot_data(plots: Sequence[Plot]) -> dict[str, Any]:
    """Build the JSON object that script.js draws: `xs`, the shared columns of x values, and `plots`."""
    lines = sum(len(plot.series) for plot in plots)
    most = max(FEWEST_BINS, min(MOST_BINS, _ALL_BINS // max(1, lines)))
    columns: dict[tuple[float, ...], int] = {}
    drawn = [_plot_data(plot, most, columns) for plot in plots]
    return {"xs": list(columns), "plots": drawn}


def is_binned(plots: Sequence[Plot], data: dict[str, Any]) -> bool:
    """Whether any line shows means of several steps."""
    counts = [len(one.points) for plot in plots for one in plot.series]
    shown = [len(one["mean"]) for plot in data["plots"] for one in plot["series"]]
    return any(after < before for before, after in zip(counts, shown, strict=True))


def as_script_data(data: dict[str, Any]) -> str:
    """Encode as JSON that may stand inside a <script> element: no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plot_data(plot: Plot, most: int, columns: dict[tuple[float, ...], int]) -> dict[str, Any]:
    if plot.stacked:
        most = min(most, _MOST_AREA_BINS)
    series = []
    for one, style in zip(plot.series, plot.styles(), strict=True):
        bins = binned(one.points, most)
        column = tuple(_short(each.x, 7) for each in bins)
        line: dict[str, Any] = {"name": one.name, "style": style, "x": columns.setdefault(column, len(columns))}
        line["mean"] = [_short(each.mean) for each in bins]
        if len(bins) < len(one.points) and not plot.stacked and len(plot.series) <= _MOST_BANDS:
            line["low"] = [_short(each.low) for each in bins]
            line["high"] = [_short(each.high) for each in bins]
        series.append(line)
    return {
        "x": plot.x,
        "zero": plot.from_zero,
        "stacked": plot.stacked,
        "marks": [_short(mark, 7) for mark in plot.marks],
        "categories": list(plot.categories),
        "series": series,
    }


def _bin(run: Sequence[Point]) -> Bin:
    values = [value for _, value in run]
    return Bin(math.fsum(x for x, _ in run) / len(run), min(values), math.fsum(values) / len(run), max(values))


def _short(value: float, digits: int = 5) -> float:
    """Round to significant digits: whole numbers stay whole, which is shorter in the file."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
