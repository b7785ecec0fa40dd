"""A run in a few words and numbers: the head of its report, and its history."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hpc_rl.formats.counted import counted
from hpc_rl.formats.offer import LentNode, by_job
from hpc_rl.tracking.formatting import duration, hours, number
from hpc_rl.tracking.history import Attempt, History, tone
from hpc_rl.tracking.page.plot import Point
from hpc_rl.tracking.recorded import RecordedRun

_MOST_LENDERS = 10
"""Of an attempt. The others are one row."""
_OF_ALL_RESPONSES = ("generate/score", "eval/score")
"""Metrics whose last value is the result of the run."""
RESULTS = {
    "Training loss": "train/loss",
    "Validation loss": "val/loss",
    "Training divergence": "train/divergence",
    "Validation divergence": "val/divergence",
    "Training accuracy": "train/accuracy",
    "Validation accuracy": "val/accuracy",
    "Training reward": "critic/score/mean",
    "Validation reward": "val/score",
}
SPEEDS = {
    "Responses/s": "perf/responses_per_s",
    "Tokens/s": "perf/tokens_per_s",
    "Tokens/s per rank or GPU": "perf/throughput",
    "MFU": "perf/mfu",
    "MFU, policy updates": "perf/mfu/actor",
}


@dataclass(frozen=True)
class Bar:
    """An attempt on the time line, in percent of its length."""

    left: float
    width: float
    tone: str


@dataclass(frozen=True)
class AttemptRow:
    """An attempt as a row of the history table."""

    number: int
    job_id: str
    began: str
    took: str
    nodes: int
    hours: str
    end: str
    tone: str
    lent: list[list[str]]
    """Jobs that lent nodes to it: cells of a table."""


@dataclass(frozen=True)
class RunSummary:
    """Everything that the page shows of a run besides its plots and samples."""

    name: str
    state: str
    tone: str
    """`done`, `failed` or empty: the colour of the state."""
    step: str
    percent: float
    facts: list[str]
    results: dict[str, str]
    """What the run learned: label -> value. All runs have the same labels; a value may be empty."""
    speeds: dict[str, str]
    """Speed and memory, in the same form."""
    config: str
    attempts: list[AttemptRow]
    track: list[Bar]
    history_total: str
    node_hours: str


def first_mean(points: Sequence[Point]) -> float | None:
    """Return the mean of the first tenth of the values, at least one; None without values."""
    return _mean(points[: _tenth(points)])


def last_mean(points: Sequence[Point]) -> float | None:
    """Return the mean of the last tenth of the values, at least one; None without values."""
    return _mean(points[-_tenth(points) :])


def result_of(run: RecordedRun, key: str) -> float | None:
    """Return a run's result in a metric: the mean of the last tenth, or the last of those that count all responses."""
    points = run.points(key)
    return last_mean(points[-1:] if key in _OF_ALL_RESPONSES else points)


def _tenth(points: Sequence[Point]) -> int:
    return max(1, len(points) // 10)


def _mean(points: Sequence[Point]) -> float | None:
    return math.fsum(value for _, value in points) / len(points) if points else None


def run_summary(run: RecordedRun) -> RunSummary:
    history = run.history
    last = run.records[-1] if run.records else {"step": 0, "total_steps": 0}
    attempts = counted(len(history.attempts), "attempt")
    requeued = f", {history.requeues} by requeue" if history.requeues else ""
    return RunSummary(
        name=run.name,
        state=run.state,
        tone=tone(run.state),
        step=f"{last['step']:,} of {last['total_steps']:,}" if run.records else "",
        percent=round(100 * min(1.0, last["step"] / max(1, last["total_steps"])), 1),
        facts=_facts(run),
        results=_results(run),
        speeds=_speeds(run),
        config=run.config,
        attempts=[_row(attempt) for attempt in history.attempts],
        track=_track(history.attempts),
        history_total=attempts + requeued,
        node_hours=hours(history.node_hours, history.lent_hours),
    )


def _facts(run: RecordedRun) -> list[str]:
    if not run.records:
        return _job_facts(run.history)
    facts = []
    computed = sum(value for _, value in run.points("timing_s/step"))
    if run.every > 1:  # saves and tests are at few steps, which are hardly ever among these
        facts.append(f"plots of one step in {run.every}")
    elif computed:
        facts.append(f"{duration(computed)} of training")
    return [*facts, *_job_facts(run.history), f"last step {_clock(run.records[-1]['time'])}"]


def _job_facts(history: History) -> list[str]:
    if not history.attempts:
        return []
    facts = [f"{hours(history.node_hours, history.lent_hours)} node hours"]
    return [f"{len(history.attempts)} attempts", *facts] if len(history.attempts) > 1 else facts


def _results(run: RecordedRun) -> dict[str, str]:
    """Return losses and rewards as means of the first and the last tenth, and the score of all responses."""
    results = {}
    for label, key in RESULTS.items():
        values = run.points(key)
        first, last = first_mean(values), last_mean(values)
        results[label] = "" if not values else f"{last:.4f}" if len(values) == 1 else f"{first:.3f} → {last:.3f}"
    scores = [result_of(run, key) for key in ("eval/score", "generate/score")]
    return results | {"Score": next((f"{score:.4f}" for score in scores if score is not None), "")}


def _speeds(run: RecordedRun) -> dict[str, str]:
    """Return speeds as medians, which leave out first steps and saves, and the peak memory."""
    speeds = {}
    for label, key in SPEEDS.items():
        values = sorted(value for _, value in run.points(key))
        middle = values[len(values) // 2] if values else 0.0
        speeds[label] = "" if not values else f"{100 * middle:.1f} %" if "/mfu" in key else number(middle)
    planned, seconds, memory = run.expected, run.points("perf/time_per_step"), run.points("perf/max_memory_gb")
    beside = f" (plan: {_seconds(planned.step_s)})" if planned is not None and planned.step_s else ""
    speeds["Time per step"] = f"{_seconds([median(value for _, value in seconds)])}{beside}" if seconds else ""
    beside = f" (plan: {planned.training_gb:.1f} GB)" if planned is not None and planned.training_gb else ""
    speeds["Peak memory"] = f"{max(value for _, value in memory):.1f} GB{beside}" if memory else ""
    return speeds


def _seconds(values: Sequence[float]) -> str:
    """Format a time, or a range of times: 0.42 s, 12 to 31 s."""
    return f"{' to '.join(dict.fromkeys(number(value) for value in values))} s"


def _row(attempt: Attempt) -> AttemptRow:
    took = duration(attempt.seconds) if attempt.began is not None else "–"
    return AttemptRow(
        number=attempt.number,
        job_id=attempt.job_id or "–",
        began="–" if attempt.began is None else _clock(attempt.began),
        took=took,
        nodes=attempt.nodes,
        hours=hours(attempt.node_hours, attempt.lent_hours),
        end=attempt.state + (f" (exit code {attempt.exit_code})" if attempt.exit_code else ""),
        tone=tone(attempt.state),
        lent=[_lent(job, attempt.state) for job in by_job(attempt.lent, _MOST_LENDERS)],
    )


def _lent(job: LentNode, state: str) -> list[str]:
    """Return who lent nodes to an attempt, from when to when, and with how many engines, tokens and their share."""
    left = _clock(job.left) if job.left is not None else "now" if state == "RUNNING" else "the end"
    return [job.name, _clock(job.joined), left, str(job.places), f"{job.tokens:,}", f"{job.share:.0%}"]


def _track(attempts: Sequence[Attempt]) -> list[Bar]:
    spans = [(a.began, a.ended or a.began, tone(a.state)) for a in attempts if a.began is not None]
    if not spans:
        return []
    first, last = min(began for began, _, _ in spans), max(ended for _, ended, _ in spans)
    scale = 100 / max(1.0, last - first)
    return [Bar(round((b - first) * scale, 2), round((e - b) * scale, 2), colour) for b, e, colour in spans]


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
