"""report.html: a run on one page, readable in any browser without a network."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.metrics import Record, read_metrics
from hpc_rl.tracking.page import PAGE
from hpc_rl.tracking.plot import Series, line_plot, stacked_plot
from hpc_rl.tracking.text import duration, number

_MOST_PHASES = 7  # the rest is summed up: more colours than that cannot be told apart


@dataclass(frozen=True)
class Plot:
    title: str
    unit: str
    keys: list[str]
    svg: str


def write_report(run_dir: RunDir) -> Path:
    """Write the report of a run, finished or not, from its metrics.jsonl and config.yaml; returns its path.

    Raises:
        UserError: the run has no metrics yet.
    """
    records = read_metrics(run_dir.metrics)
    if not records:
        raise UserError(f"{run_dir.path} has no metrics yet (metrics.jsonl)")
    last = records[-1]
    done = last["step"] >= last["total_steps"]
    page = (
        Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            name=run_dir.name,
            state="finished" if done else f"at step {last['step']:,} of {last['total_steps']:,}",
            done=done,
            percent=round(100 * min(1.0, last["step"] / max(1, last["total_steps"])), 1),
            facts=_facts(records),
            numbers=_numbers(records),
            plots=_plots(records),
            config=run_dir.config.read_text(encoding="utf-8") if run_dir.config.is_file() else "",
        )
    )
    temporary = run_dir.report.with_name(f".{run_dir.report.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(run_dir.report)
    return run_dir.report


def _facts(records: Sequence[Record]) -> list[str]:
    last = records[-1]
    facts = [f"{last['step']:,} steps"] if last["step"] >= last["total_steps"] else []
    computed = sum(value for _, value in _points(records, "timing_s/step"))
    if computed:
        facts.append(f"{duration(computed)} of training")
    return [*facts, "last step " + time.strftime("%Y-%m-%d %H:%M", time.localtime(last["time"]))]


def _numbers(records: Sequence[Record]) -> list[tuple[str, str]]:
    """The run in a row: where losses ended, how fast it was (median, since first steps and saves are slow)."""
    numbers = []
    for label, key in (
        ("Training loss", "train/loss"),
        ("Validation loss", "val/loss"),
        ("Training score", "critic/score/mean"),
        ("Validation score", "val/score"),
    ):
        if values := _points(records, key):
            first, end = values[0][1], values[-1][1]
            numbers.append((label, f"{end:.4f}" if len(values) == 1 else f"{first:.3f} → {end:.3f}"))
    for label, key, unit in (
        ("Tokens/s", "perf/tokens_per_s", ""),
        ("Tokens/s/GPU", "perf/throughput", ""),
        ("MFU", "perf/mfu", "%"),
        ("MFU of the policy's updates", "perf/mfu/actor", "%"),
    ):
        if values := _points(records, key):
            median = sorted(value for _, value in values)[len(values) // 2]
            numbers.append((label, f"{100 * median:.1f} %" if unit else number(median)))
    if values := _points(records, "perf/max_memory_gb"):
        numbers.append(("Memory, peak", f"{max(value for _, value in values):.1f} GB"))
    return numbers


def _plots(records: Sequence[Record]) -> list[Plot]:
    simple = [
        ("Training loss", "per target token", "train/loss", False),
        ("Validation loss", "per target token", "val/loss", False),
        ("Learning rate", "", "train/lr", True),
        ("Gradient norm", "before clipping", "train/grad_norm", True),
        ("Training score", "mean of a step's responses", "critic/score/mean", False),
        ("Validation score", "greedy responses", "val/score", False),
        ("Response length", "tokens, mean", "response_length/mean", True),
        ("Entropy", "nats per token", "actor/entropy", True),
        ("Update", "KL(old, new) per token", "actor/ppo_kl", False),
        ("Clipped", "part of the tokens", "actor/pg_clipfrac", True),
        ("Critic", "explained variance", "critic/vf_explained_var", False),
        ("Speed", "tokens/s", "perf/tokens_per_s", True),
        ("Memory", "GB", "perf/max_memory_gb", True),
    ]
    plots = [
        Plot(title, unit, [title], line_plot([Series(title, points)], from_zero=from_zero))
        for title, unit, key, from_zero in simple
        if (points := _points(records, key))
    ]
    phases = _phases(records)
    if phases:
        plots.append(Plot("Time per step", "seconds", [s.name for s in phases], stacked_plot(phases)))
    return plots


def _phases(records: Sequence[Record]) -> list[Series]:
    """timing_s/<phase> of every step as series that add up, the longest first; timing_s/step only gives the rest."""
    timed = [record for record in records if any(key.startswith("timing_s/") for key in record)]
    keys = {key for record in timed for key in record if key.startswith("timing_s/")} - {"timing_s/step"}
    totals = {key: sum(record.get(key) or 0.0 for record in timed) for key in keys}
    shown = sorted(keys, key=lambda key: (-totals[key], key))[:_MOST_PHASES]
    series = [Series(key.removeprefix("timing_s/"), [(r["step"], r.get(key) or 0.0) for r in timed]) for key in shown]
    rest = [
        (r["step"], max(0.0, (r.get("timing_s/step") or 0.0) - sum(r.get(key) or 0.0 for key in shown))) for r in timed
    ]
    if sum(value for _, value in rest) > 0.01 * sum(totals.values()):
        series.append(Series("other" if shown else "step", rest))
    return series


def _points(records: Sequence[Record], key: str) -> list[tuple[float, float]]:
    """(step, value) where a record has the metric; null (NaN, Inf) is left out."""
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]
