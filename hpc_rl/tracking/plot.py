"""Small line and area plots as SVG text, coloured by the page's CSS (classes s0, s1, ...)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from hpc_rl.tracking.text import number

WIDTH, HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 10, 26
_MOST_POINTS = 400  # more than that in 400 pixels is only file size

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    """(step, value), steps ascending, values finite."""


def line_plot(series: Sequence[Series], *, from_zero: bool = False) -> str:
    """One line per series, over the step. A series of one point is a dot.

    Args:
        from_zero: start the value axis at 0, for amounts; otherwise at the smallest value.
    """
    shown = [Series(s.name, _thinned(s.points)) for s in series if s.points]
    axes = _Axes.around([p for s in shown for p in s.points], from_zero)
    marks = [
        f'<polyline class="s{index}" points="{_path(axes, s.points)}"/>{_dots(axes, index, s)}'
        for index, s in enumerate(shown)
    ]
    return _svg(axes, marks)


def stacked_plot(series: Sequence[Series]) -> str:
    """Areas on top of each other; all series have the same steps."""
    shown = [Series(s.name, _thinned(s.points)) for s in series]
    tops = [[0.0] * len(shown[0].points)]
    for s in shown:
        tops.append([below + value for below, (_, value) in zip(tops[-1], s.points, strict=True)])
    xs = [x for x, _ in shown[0].points]
    axes = _Axes.around(list(zip(xs, tops[-1], strict=True)), from_zero=True)
    marks = []
    for index, (low, high) in enumerate(pairwise(tops)):
        edge = [*zip(xs, high, strict=True), *reversed(list(zip(xs, low, strict=True)))]
        marks.append(f'<polygon class="s{index}" points="{_path(axes, edge)}"/>')
    return _svg(axes, marks)


@dataclass(frozen=True)
class _Axes:
    x0: float
    x1: float
    y0: float
    y1: float
    y_ticks: list[float]

    @classmethod
    def around(cls, points: Sequence[Point], from_zero: bool) -> _Axes:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        low, high = (min(0.0, *ys, 0.0) if from_zero else min(ys)), max(ys)
        if high - low <= 1e-9 * max(abs(high), abs(low)):  # a constant: a little room on both sides
            low, high = (low if from_zero else low - (abs(low) / 2 or 1)), high + (abs(high) / 2 or 1)
        step = _round_step((high - low) / 4)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = [i * step for i in range(first, last + 1)]
        room = 0 if min(xs) < max(xs) else 1
        return cls(min(xs) - room, max(xs) + room, ticks[0], ticks[-1], ticks)

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - _TOP - _BOTTOM)

    def x_ticks(self) -> list[float]:
        step = max(1.0, _round_step((self.x1 - self.x0) / 5))
        return [i * step for i in range(math.ceil(self.x0 / step), math.floor(self.x1 / step) + 1)]


def _round_step(size: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(size))
    return next((m * power for m in (1, 2, 5) if m * power >= size * (1 - 1e-9)), 10 * power)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Means of equal runs of points, where there are more than can be seen."""
    size = -(-len(points) // _MOST_POINTS)
    if size <= 1:
        return list(points)
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def _path(axes: _Axes, points: Sequence[Point]) -> str:
    return " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in points)


def _dots(axes: _Axes, index: int, series: Series) -> str:
    """Points to hover over; visible where they are so few that a line alone says little."""
    few = "" if len(series.points) <= 12 else " faint"
    return "".join(
        f'<circle class="s{index}{few}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3">'
        f"<title>{escape(series.name)}, step {x:.0f}: {number(y)}</title></circle>"
        for x, y in series.points
    )


def _svg(axes: _Axes, marks: Sequence[str]) -> str:
    grid = [
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{axes.y(v):.1f}" y2="{axes.y(v):.1f}"/>'
        f'<text class="tick" text-anchor="end" x="{_LEFT - 8}" y="{axes.y(v) + 4:.1f}">{number(v)}</text>'
        for v in axes.y_ticks
    ]
    steps = [
        f'<text class="tick" text-anchor="middle" x="{axes.x(v):.1f}" y="{HEIGHT - 8}">{number(v)}</text>'
        for v in axes.x_ticks()
    ]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join([*grid, *steps, *marks])}</svg>'
