"""timeline.json: when each part of a run's latest step ran, as spans of seconds since the start of the step.

    {"step": 12, "seconds": 31.4, "phases": {"gen": [[0.0, 18.2]], "update_actor": [[22.5, 30.1]], ...}}

Only the latest step is kept, because metrics.jsonl has the seconds of each phase for all steps.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from hpc_rl.system.files import read_regular, write_atomically
from hpc_rl.tracking.formatting import number

Span = tuple[float, float]

PHASES = {
    "gen": ("generation", 0),
    "reward": ("rewards", 1),
    "old_log_prob": ("log-probabilities", 2),
    "ref": ("reference", 10),
    "teacher": ("teacher", 14),
    "values": ("values", 7),
    "check_adapters": ("check of adapters", 13),
    "adv": ("advantages", 12),
    "carry": ("data transfer", 8),
    "update_critic": ("critic update", 9),
    "update_actor": ("policy update", 3),
    "update_weights": ("weight sync", 4),
    "data": ("data", 1),
    "window": ("wait for data", 4),
    "forward_backward": ("forward and backward", 0),
    "optimizer": ("optimizer", 2),
    "save_checkpoint": ("save", 5),
    "write_checkpoint": ("write of the checkpoint", 11),
    "testing": ("validation", 6),
}
"""Phase, as in timing_s/PHASE -> its name, and the index of its colour. The order is that of a step. Phases of a run
have different colours."""
LENT_BY = "gen/"
"""Beginning of the phases in which engines of other jobs generated. `job 41` or `12 jobs` follows."""
_LENDER = re.compile(rf"{LENT_BY}(job (?a:\w[\w.+-]{{0,63}})|\d{{1,9}} jobs)")
_MOST_LENDERS = 4
"""More jobs than that are one phase."""
COLOURS = 16
"""Of areas and lines, as page/style.css and page/script.js have them."""
OTHER_COLOUR = 15
"""Of what is in no phase."""
_MOST_SPANS = 40
"""Of a phase; with more, the shortest gaps between them are closed."""
_MOST_TICKS = 6
_MOST_BYTES = 2**22
"""Of timeline.json."""


@dataclass(frozen=True)
class Timeline:
    """The spans of a step."""

    step: int
    seconds: float
    """From the start of the step to its end, with saving and validation."""
    phases: dict[str, list[Span]]
    """In the order of PHASES; the spans of a phase are in order and do not overlap."""

    @property
    def length(self) -> str:
        """The seconds as text."""
        return f"{number(round(self.seconds, 2))} s"


@dataclass(frozen=True)
class PhaseRow:
    """A phase, as report and `watch` show it."""

    name: str
    colour: int
    bars: list[tuple[float, float]]
    """(left, width), in percent of the step."""
    seconds: str
    """Of all its spans."""
    times: str
    """The spans as text, for those who cannot see the bars."""


def named(phases: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return name and colour of each phase of a run. Phases of other programs get the colours that are left."""
    own = {phase: PHASES[phase] for phase in phases if phase in PHASES}
    free = set(range(COLOURS)) - {OTHER_COLOUR, *(colour for _, colour in own.values())}
    others = zip(sorted({*phases} - {*own}), cycle(sorted(free) or [OTHER_COLOUR]), strict=False)
    return own | {phase: (phase.replace("_", " "), colour) for phase, colour in others}


def new_timeline(step: int, seconds: float, phases: Mapping[str, Sequence[Span]]) -> Timeline:
    """Return the timeline of a step.

    Args:
        phases: spans in any order, which may overlap, or begin before the step.
    """
    lent = sorted(filter(_LENDER.fullmatch, phases), key=lambda phase: (len(phase), phase))
    if len(lent) > _MOST_LENDERS:
        every = f"{LENT_BY}{len(lent)} jobs"
        phases, lent = {**phases, every: [span for phase in lent for span in phases[phase]]}, [every]
    ordered = ["gen", *lent, *(phase for phase in PHASES if phase != "gen")]
    found = {phase: _joined(_within(phases[phase], seconds)) for phase in ordered if phase in phases}
    return Timeline(step, round(seconds, 3), {phase: spans for phase, spans in found.items() if spans})


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Replace the timeline of the step before. Raises OSError if the file cannot be written."""
    write_atomically(path, json.dumps(vars(timeline)) + "\n")


def read_timeline(path: Path, last_step: float) -> Timeline | None:
    """Return the timeline of a run's latest step.

    Args:
        last_step: that the run has recorded. A resumed run repeats later ones.

    Returns:
        None if there is none, or the file cannot be read.
    """
    try:
        found = json.loads(read_regular(path, _MOST_BYTES))
        phases = {
            phase: [(float(start), float(end)) for start, end in spans] for phase, spans in found["phases"].items()
        }
        timeline = new_timeline(int(found["step"]), float(found["seconds"]), phases)
        return timeline if 0 < timeline.seconds < math.inf and timeline.step <= last_step else None
    except (OSError, OverflowError, RecursionError, ValueError, TypeError, KeyError, AttributeError):
        return None


def rows(timeline: Timeline) -> list[PhaseRow]:
    """Return the phases as report and `watch` show them."""
    scale = 100 / max(timeline.seconds, 1e-3)
    return [
        PhaseRow(
            *(PHASES.get(phase) or (f"lent by {phase.removeprefix(LENT_BY)}", PHASES["gen"][1])),
            [(round(start * scale, 2), round((end - start) * scale, 2)) for start, end in spans],
            number(round(sum(end - start for start, end in spans), 2)),
            ", ".join(f"{number(round(start, 2))} to {number(round(end, 2))} s" for start, end in spans),
        )
        for phase, spans in timeline.phases.items()
    ]


def ticks(seconds: float) -> list[tuple[float, str]]:
    """Return the marks of an axis from 0 to so many seconds: (position in percent, number), 1, 2 or 5 x 10^n apart."""
    if seconds <= 0:
        return []
    least = seconds / _MOST_TICKS
    size = 10.0 ** math.floor(math.log10(least))
    every = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= least)
    return [(round(100 * i * every / seconds, 2), number(round(i * every, 9))) for i in range(int(seconds / every) + 1)]


def cells(spans: Iterable[Span], seconds: float, width: int) -> list[bool]:
    """Divide a step into so many cells, and return which of them a phase touches."""
    touched = [False] * width
    for start, end in spans:
        first = min(int(start / seconds * width), width - 1)
        last = max(math.ceil(end / seconds * width), first + 1)
        touched[first:last] = [True] * (last - first)
    return touched[:width]


def _within(spans: Iterable[Span], seconds: float) -> list[Span]:
    cut = [(max(0.0, start), min(seconds, end)) for start, end in spans]
    return [(start, end) for start, end in cut if start < end]


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, with those that overlap as one, and at most _MOST_SPANS of them."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    gaps = sorted(range(1, len(merged)), key=lambda index: merged[index][0] - merged[index - 1][1])
    starts = sorted([0, *gaps[len(gaps) - _MOST_SPANS + 1 :]]) if len(merged) > _MOST_SPANS else range(len(merged))
    ends = [*(start - 1 for start in starts[1:]), len(merged) - 1]
    spans = zip(starts, ends, strict=True) if merged else ()
    return [(round(merged[first][0], 3), round(merged[last][1], 3)) for first, last in spans]
