"""Small line and area plots as SVG text, coloured by the page's CSS (classes s0, s1, ...).

The page's script reads values back from the coordinates, by the attribute `data-axes`, so that no number is in the file
twice. Long series are thinned: a line of means, in a band from the smallest to the largest value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from hpc_rl.tracking.formatting import number

WIDTH, HEIGHT = 400, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 10, 24
_MOST_POINTS = 300
_MOST_AREA_POINTS = 150
_FEW_POINTS = 12
"""So few are shown as dots, since a line alone would say little."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    """(x, value), x ascending, values finite."""
    style: int | None = None
    """Which of the page's styles; its place among the others where not given."""


@dataclass(frozen=True)
class Bucket:
    """Neighbouring points as one: their mean place, and their smallest, mean and largest value."""

    x: float
    low: float
    mean: float
    high: float


def line_plot(
    series: Sequence[Series], *, title: str = "", from_zero: bool = False, marks: Sequence[float] = (), x: str = "step"
) -> str:
    """One line per series. A series of one point is a dot.

    Args:
        title: for readers who hear the page.
        from_zero: start the value axis at 0, for amounts; otherwise at the smallest value.
        marks: places on the x axis to draw a dashed line at.
        x: what the x axis shows.
    """
    shown = [(s.style if s.style is not None else i, s, thinned(s.points)) for i, s in enumerate(series) if s.points]
    corners = [(b.x, v) for _, _, buckets in shown for b in buckets for v in (b.low, b.high)]
    axes = _Axes.around(corners, from_zero)
    drawn = [_mark(axes, place) for place in marks if axes.x0 < place < axes.x1]
    drawn += [_band(axes, style, buckets) for style, s, buckets in shown if len(buckets) < len(s.points)]
    drawn += [_line(axes, style, s.name, buckets) for style, s, buckets in shown]
    spoken = "; ".join(f"{s.name} {number(s.points[0][1])} to {number(s.points[-1][1])}" for _, s, _ in shown)
    return _svg(axes, drawn, f"{title}: {spoken}", x)


def stacked_plot(series: Sequence[Series], *, title: str = "", x: str = "step") -> str:
    """Areas on top of each other; all series have the same steps."""
    shown = [(s.name, thinned(s.points, _MOST_AREA_POINTS)) for s in series]
    xs = [bucket.x for bucket in shown[0][1]]
    tops = [[0.0] * len(xs)]
    for _, buckets in shown:
        tops.append([below + bucket.mean for below, bucket in zip(tops[-1], buckets, strict=True)])
    axes = _Axes.around(list(zip(xs, tops[-1], strict=True)), from_zero=True)
    if len(xs) == 1:  # one step is a bar
        xs, tops = [axes.x0, axes.x1], [top * 2 for top in tops]
    drawn = []
    for style, ((name, _), (low, high)) in enumerate(zip(shown, pairwise(tops), strict=True)):
        edge = [*zip(xs, high, strict=True), *reversed(list(zip(xs, low, strict=True)))]
        drawn.append(f'<polygon class="s{style}" data-name="{escape(name)}" points="{_path(axes, edge)}"/>')
    means = [(name, sum(bucket.mean for bucket in buckets) / len(buckets)) for name, buckets in shown]
    spoken = "; ".join(f"{name} {number(mean)}" for name, mean in means)
    return _svg(axes, drawn, f"{title}, means: {spoken}", x)


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Bucket]:
    """Equal runs of points as one, where there are more than can be seen."""
    size = max(1, -(-len(points) // most))
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [_bucket(run) for run in runs]


def _bucket(run: Sequence[Point]) -> Bucket:
    values = [value for _, value in run]
    return Bucket(math.fsum(x for x, _ in run) / len(run), min(values), math.fsum(values) / len(run), max(values))


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

    def x_ticks(self, whole: bool) -> list[float]:
        step = _round_step((self.x1 - self.x0) / 5)
        step = max(1.0, step) if whole else step
        return [i * step for i in range(math.ceil(self.x0 / step), math.floor(self.x1 / step) + 1)]

    def as_data(self) -> str:
        """Places on the picture and what they stand for: left, right, x0, x1, bottom, top, y0, y1."""
        places = (_LEFT, WIDTH - _RIGHT, self.x0, self.x1, HEIGHT - _BOTTOM, _TOP, self.y0, self.y1)
        return " ".join(f"{place:.10g}" for place in places)


def _round_step(size: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(size))
    return next((m * power for m in (1, 2, 5) if m * power >= size * (1 - 1e-9)), 10 * power)


def _path(axes: _Axes, points: Sequence[Point], digits: int = 5) -> str:
    return " ".join(f"{axes.x(x):.{digits}g},{axes.y(y):.{digits}g}" for x, y in points)


def _line(axes: _Axes, style: int, name: str, buckets: Sequence[Bucket]) -> str:
    points = [(bucket.x, bucket.mean) for bucket in buckets]
    line = f'<polyline class="s{style}" data-name="{escape(name)}" points="{_path(axes, points)}"/>'
    if len(points) > _FEW_POINTS:
        return line
    return line + "".join(
        f'<circle class="s{style}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3"/>' for x, y in points
    )


def _band(axes: _Axes, style: int, buckets: Sequence[Bucket]) -> str:
    edge = [*((b.x, b.high) for b in buckets), *((b.x, b.low) for b in reversed(buckets))]
    return f'<polygon class="band s{style}" points="{_path(axes, edge, digits=4)}"/>'


def _mark(axes: _Axes, place: float) -> str:
    return f'<line class="mark" x1="{axes.x(place):.1f}" x2="{axes.x(place):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'


def _svg(axes: _Axes, drawn: Sequence[str], spoken: str, x: str) -> str:
    grid = [
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{axes.y(v):.1f}" y2="{axes.y(v):.1f}"/>'
        f'<text class="tick" text-anchor="end" x="{_LEFT - 7}" y="{axes.y(v) + 4:.1f}">{number(v)}</text>'
        for v in axes.y_ticks
    ]
    ticks = [
        f'<text class="tick" text-anchor="middle" x="{axes.x(v):.1f}" y="{HEIGHT - 6}">{number(v)}</text>'
        for v in axes.x_ticks(whole=x == "step")
    ]
    ticks.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 7}" y="{HEIGHT - 6}">{escape(x)}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(spoken)}" data-axes="{axes.as_data()}"'
        f' data-x="{escape(x)}">{"".join([*grid, *ticks, *drawn])}</svg>'
    )
