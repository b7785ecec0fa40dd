"""A run in a few words and numbers: the head of its report, and its history."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hpc_rl.host.counted import counted
from hpc_rl.tracking.formatting import duration, hours, number
from hpc_rl.tracking.history import KILLED, Attempt, History
from hpc_rl.tracking.plot import Point
from hpc_rl.tracking.recorded import Recorded

_OF_ALL_RESPONSES = ("generate/score", "eval/score")
"""Metrics whose last value is the result of the run."""
_TONES = {"COMPLETED": "done", "RUNNING": "", "STOPPED": "", "REQUEUED": ""}


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


@dataclass(frozen=True)
class RunSummary:
    """Everything that the page shows of a run besides its plots and samples."""

    name: str
    state: str
    tone: str
    """`done`, `failed` or empty: the colour of the state."""
    percent: float
    facts: list[str]
    numbers: list[tuple[str, str]]
    config: str
    attempts: list[AttemptRow]
    track: list[Bar]
    history_total: str
    node_hours: str

    @property
    def by_label(self) -> dict[str, str]:
        return dict(self.numbers)


def first_mean(points: Sequence[Point]) -> float | None:
    """Return the mean of the first tenth of the values, at least one; None without values."""
    return _mean(points[: _tenth(points)])


def last_mean(points: Sequence[Point]) -> float | None:
    """Return the mean of the last tenth of the values, at least one; None without values."""
    return _mean(points[-_tenth(points) :])


def result_of(run: Recorded, key: str) -> float | None:
    """Return a run's result in a metric: the mean of the last tenth, or the last of those that count all responses."""
    points = run.points(key)
    return last_mean(points[-1:] if key in _OF_ALL_RESPONSES else points)


def _tenth(points: Sequence[Point]) -> int:
    return max(1, len(points) // 10)


def _mean(points: Sequence[Point]) -> float | None:
    return math.fsum(value for _, value in points) / len(points) if points else None


def run_summary(run: Recorded) -> RunSummary:
    history = run.history
    last = run.records[-1] if run.records else {"step": 0, "total_steps": 0}
    state, tone = _state(run)
    attempts = counted(len(history.attempts), "attempt")
    requeued = f", {history.requeues} by requeue" if history.requeues else ""
    return RunSummary(
        name=run.name,
        state=state,
        tone=tone,
        percent=round(100 * min(1.0, last["step"] / max(1, last["total_steps"])), 1),
        facts=_facts(run),
        numbers=_numbers(run),
        config=run.config,
        attempts=[_row(attempt) for attempt in history.attempts],
        track=_track(history.attempts),
        history_total=attempts + requeued,
        node_hours=hours(history.node_hours),
    )


def _state(run: Recorded) -> tuple[str, str]:
    """Return the run's state in words, and its tone."""
    last_attempt = run.history.attempts[-1] if run.history.attempts else None
    word = _word(last_attempt) if last_attempt else ""
    tone = _TONES.get(last_attempt.state, "failed") if last_attempt else ""
    if not run.records:
        return word, tone
    step, total = run.records[-1]["step"], run.records[-1]["total_steps"]
    if step < total:
        return f"{'' if word == 'running' else word} at step {step:,} of {total:,}".lstrip(), tone
    return (f"{word} after the last step", tone) if tone == "failed" else ("finished", "done")


def _facts(run: Recorded) -> list[str]:
    if not run.records:
        return _job_facts(run.history)
    last = run.records[-1]
    facts = [counted(last["step"], "step")] if last["step"] >= last["total_steps"] else []
    computed = sum(value for _, value in run.points("timing_s/step"))
    if run.every > 1:  # saves and tests are at few steps, which are hardly ever among these
        facts.append(f"plots of one step in {run.every}")
    elif computed:
        facts.append(f"{duration(computed)} of training")
    return [*facts, *_job_facts(run.history), f"last step {_clock(last['time'])}"]


def _job_facts(history: History) -> list[str]:
    if not history.attempts:
        return []
    facts = [f"{hours(history.node_hours)} node hours"]
    return [f"{len(history.attempts)} attempts", *facts] if len(history.attempts) > 1 else facts


def _numbers(run: Recorded) -> list[tuple[str, str]]:
    """Return the run's results: losses and rewards as means of the first and last tenth, speeds as medians.

    The median leaves out first steps and saves, which are slow.
    """
    numbers = []
    for label, key in (
        ("Training loss", "train/loss"),
        ("Validation loss", "val/loss"),
        ("Training divergence", "train/divergence"),
        ("Validation divergence", "val/divergence"),
        ("Training accuracy", "train/accuracy"),
        ("Validation accuracy", "val/accuracy"),
        ("Training reward", "critic/score/mean"),
        ("Validation reward", "val/score"),
    ):
        if values := run.points(key):
            first, last = first_mean(values), last_mean(values)
            numbers.append((label, f"{last:.4f}" if len(values) == 1 else f"{first:.3f} → {last:.3f}"))
    scores = [result_of(run, key) for key in ("eval/score", "generate/score")]
    if score := next((f"{score:.4f}" for score in scores if score is not None), None):
        numbers.append(("Score", score))
    for label, key, unit in (
        ("Responses/s", "perf/responses_per_s", ""),
        ("Tokens/s", "perf/tokens_per_s", ""),
        ("Tokens/s per rank or GPU", "perf/throughput", ""),
        ("MFU", "perf/mfu", "%"),
        ("MFU, policy updates", "perf/mfu/actor", "%"),
    ):
        if values := run.points(key):
            middle = sorted(value for _, value in values)[len(values) // 2]
            numbers.append((label, f"{100 * middle:.1f} %" if unit else number(middle)))
    planned = run.expected
    if values := run.points("perf/time_per_step"):
        beside = f" (plan: {_seconds(planned.step_s)})" if planned is not None and planned.step_s else ""
        numbers.append(("Time per step", f"{_seconds([median(value for _, value in values)])}{beside}"))
    if values := run.points("perf/max_memory_gb"):
        beside = f" (plan: {planned.training_gb:.1f} GB)" if planned is not None and planned.training_gb else ""
        numbers.append(("Peak memory", f"{max(value for _, value in values):.1f} GB{beside}"))
    return numbers


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
        hours=hours(attempt.node_hours),
        end=_word(attempt) + (f" (exit code {attempt.exit_code})" if attempt.exit_code else ""),
        tone=_TONES.get(attempt.state, "failed"),
    )


def _word(attempt: Attempt) -> str:
    words = {KILLED: "killed", "REQUEUED": "requeued", "OUT_OF_MEMORY": "out of memory"}
    return words.get(attempt.state, attempt.state.lower().replace("_", " "))


def _track(attempts: Sequence[Attempt]) -> list[Bar]:
    spans = [(a.began, a.ended or a.began, _TONES.get(a.state, "failed")) for a in attempts if a.began is not None]
    if not spans:
        return []
    first, last = min(began for began, _, _ in spans), max(ended for _, ended, _ in spans)
    scale = 100 / max(1.0, last - first)
    return [Bar(round((b - first) * scale, 2), round((e - b) * scale, 2), tone) for b, e, tone in spans]


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
