"""Sentences about a plan, for `hpc-rl plan` and for the check before submission."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_rl.formats.counted import counted
from hpc_rl.plan.advice import Advice, words
from hpc_rl.plan.duration import PROMPTS, Duration
from hpc_rl.plan.plan import Plan
from hpc_rl.plan.rows import MICRO_TOKENS, Reason, RowChoice

_MOST_PARTS = 4
"""Parts of a peak that are named."""
_UNITS = ((3600, "h"), (60, "min"), (1, "s"))
"""Units of time in seconds. A unit is used from 2 of it on."""
_NO_LONGER: dict[Reason, str] = {
    "memory": "",
    "part": ", which hold a rank's whole part of a batch",
    "speed": "; longer rows are hardly faster",
    "host": "; longer rows take more host memory (model.enable_activation_offload)",
}


def gigabytes(size: float) -> str:
    """Format bytes as 10^9 bytes: 0.04, 3.1, 120."""
    number = size / 1e9
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.1f}" if abs(number) >= 0.1 else f"{number:.2f}"


def parts_text(parts: Mapping[str, float]) -> str:
    """Name the largest parts of a peak with their sizes."""
    largest = sorted(((name, size) for name, size in parts.items() if size), key=lambda part: -part[1])[:_MOST_PARTS]
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in largest)


def arithmetic(plan: Plan) -> str:
    """State what the fullest phase needs, of what, and what a GPU has."""
    phase = plan.fullest
    where = f" of pool {phase.pool}" if phase.pool else ""
    return (
        f"the phase `{phase.name}`{where} needs {gigabytes(phase.peak)} GB on each GPU "
        f"({parts_text({**phase.resident, **phase.working})}), and of {gigabytes(plan.gpu)} GB about "
        f"{gigabytes(plan.usable)} are usable"
    )


def rows_text(rows: RowChoice, gpu: float) -> str:
    """State what trainer.micro_tokens=auto is, and why.

    Args:
        gpu: memory of one GPU, in bytes.
    """
    needs = f"The phase `{rows.fullest.name}` needs {gigabytes(rows.fullest.peak)} GB"
    if rows.longer is not None:
        needs += f", and with {rows.longer[0]:,} it would need {gigabytes(rows.longer[1])} GB"
    return (
        f"{MICRO_TOKENS}=auto: {rows.tokens:,} tokens in each pass of a rank{_NO_LONGER[rows.reason]}. {needs}; a "
        f"plan may use {gigabytes(rows.limit)} of {gigabytes(gpu)} GB"
    )


def cache_text(plan: Plan) -> str:
    """State what the cache of an engine holds. The plan has an engine."""
    assert plan.engine is not None
    engine = plan.engine
    if engine.cache <= 0:
        return "the weights of the model do not fit into an engine's part of a GPU"
    full, most = engine.full_sequences, engine.sequences
    part = f"all of its {most}" if full >= most else f"{full} of its {most}"
    return (
        f"the cache of an engine holds {engine.cache:,.0f} tokens: {part} responses (rollout.max_num_seqs) at their "
        f"full length of {engine.sequence:,} tokens with the prompt"
    )


def time_text(time: Duration, generates_only: bool) -> list[str]:
    """State how long a step takes and why, and how long the run takes.

    Args:
        generates_only: whether the job trains nothing, so that its time is that of PROMPTS prompts.
    """
    unit = f"for {PROMPTS:,} prompts" if generates_only else "for a step"
    lines = [f"{_range([_seconds(seconds) for seconds in time.step])} {unit} ({time.basis})"]
    if time.steps is None or time.run is None or time.node_hours is None:
        return lines
    count = "" if generates_only else f" for {counted(round(time.steps), 'step')}"
    hours = _range([_two_digits(hours) for hours in time.node_hours])
    whole, plural = _range([_seconds(seconds) for seconds in time.run]), "" if hours == "1" else "s"
    return [*lines, f"{whole}{count}: {hours} node hour{plural}"]


def _seconds(seconds: float) -> str:
    """Format a time with two digits: 0.42 s, 12 s, 4.5 min, 31 h."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= 2 * size), _UNITS[-1])
    return f"{_two_digits(seconds / size)} {unit}"


def _two_digits(value: float) -> str:
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def _range(values: list[str]) -> str:
    """Join the ends of a range; one text if they are the same, and the unit once if both have it."""
    low, high = values[0], values[-1]
    if low == high:
        return low
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if unit == high.partition(" ")[2] else f"{low} to {high}"


def problem(plan: Plan) -> str:
    """State why a job does not fit."""
    return arithmetic(plan) if plan.is_too_full else cache_text(plan)


def remedies(*ways: Advice | None) -> list[str]:
    """Return what makes a job fit, one way each."""
    found = [f"{' '.join(words(way.settings))} ({'; '.join(way.reasons)})" for way in ways if way is not None]
    return found or ["GPUs with more memory, or a smaller model"]
