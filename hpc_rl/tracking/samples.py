"""Which sample texts a report shows: a few prompts, how the responses to them changed, or how those of runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hpc_rl.tracking.formatting import number
from hpc_rl.tracking.recorded import Recorded, TextSample

_MOST_PROMPTS = 6
_MOST_STEPS = 6
_MOST_CHARACTERS = 1500
"""Of one text; the whole is in samples.jsonl."""


@dataclass(frozen=True)
class ShownSample:
    """A prompt, and responses to it."""

    prompt: str
    answer: str
    what: str
    """What tells the responses apart."""
    rows: list[tuple[str, str, str]]
    """(step or run, response, score)."""


def samples_of_one(run: Recorded) -> list[ShownSample]:
    """The first prompts, each with its responses at the first step, at the last, and at some between."""
    steps = spread(sorted({sample.step for sample in run.samples}), _MOST_STEPS)
    by_prompt = _by_prompt([sample for sample in run.samples if sample.step in steps])
    return [
        ShownSample(cut(prompt), cut(found[-1].answer), "Step", _over_time(found))
        for prompt, found in list(by_prompt.items())[:_MOST_PROMPTS]
    ]


def samples_of_several(runs: Sequence[Recorded]) -> list[ShownSample]:
    """Prompts that at least two runs have answered, each with the runs' last responses."""
    last = [{sample.prompt: sample for sample in run.samples} for run in runs]
    shared = [prompt for each in last for prompt in each if sum(prompt in other for other in last) > 1]
    shown = []
    for prompt in list(dict.fromkeys(shared))[:_MOST_PROMPTS]:
        found = [(run.name, each[prompt]) for run, each in zip(runs, last, strict=True) if prompt in each]
        rows = [_row(f"{name}, step {sample.step:,}", sample) for name, sample in found]
        shown.append(ShownSample(cut(prompt), cut(found[0][1].answer), "Run", rows))
    return shown


def spread(steps: Sequence[int], most: int) -> set[int]:
    """At most so many of them, the first and the last among them, evenly by their place."""
    if len(steps) <= most:
        return set(steps)
    return {steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)}


def cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}… ({len(text) - _MOST_CHARACTERS:,} more characters)"


def _over_time(samples: Sequence[TextSample]) -> list[tuple[str, str, str]]:
    """A row for each response that is not the one before."""
    rows = []
    for _, same in groupby(samples, key=lambda sample: (sample.response, sample.score)):
        first, *others = same
        steps = f"{first.step:,} to {others[-1].step:,}" if others else f"{first.step:,}"
        rows.append(_row(steps, first))
    return rows


def _by_prompt(samples: Sequence[TextSample]) -> dict[str, list[TextSample]]:
    found: dict[str, list[TextSample]] = {}
    for sample in samples:
        found.setdefault(sample.prompt, []).append(sample)
    return found


def _row(label: str, sample: TextSample) -> tuple[str, str, str]:
    return label, cut(sample.response), "–" if sample.score is None else number(sample.score)
