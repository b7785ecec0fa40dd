"""samples.jsonl: prompts, responses and scores of training and validation; and the excerpt that a report shows.

Keys of a line: `step`, `split` ("train" or "val"), `prompt`, `response`, `answer` (the reference answer) and `score`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from hpc_rl.formats.typed_json import is_count, is_number, object_of
from hpc_rl.system.files import last_lines_of, open_regular
from hpc_rl.tracking.formatting import number

TRAIN, VAL = "train", "val"
_RECORDED_STEPS = 50
"""Training samples are recorded at about so many steps of a run, whatever its length."""
_RECORDED_PROMPTS = 2
"""Prompts of a training step that are recorded."""
_MOST_BYTES, _MOST_LINE_BYTES = 2**28, 2**24
"""At the end of samples.jsonl that are read, and of a line."""
_MOST_PROMPTS = 6
_MOST_STEPS = 6
_MOST_CHARACTERS = 1500
"""Of one text in a report; samples.jsonl has all of it."""


@dataclass(frozen=True)
class TextSample:
    """A response to a prompt, as samples.jsonl has it."""

    step: int
    split: str
    prompt: str
    response: str
    answer: str
    score: float | None


@dataclass(frozen=True)
class Excerpt:
    """A prompt and responses to it, as the report shows them."""

    prompt: str
    answer: str
    column: str
    """Heading of the column that distinguishes the responses."""
    rows: list[tuple[str, str, str]]
    """(step or run, response, score)."""


@dataclass(frozen=True)
class ExcerptGroup:
    """Excerpts below a common heading."""

    title: str
    excerpts: list[Excerpt]


def records_training_samples(step: int, total_steps: int) -> bool:
    """Whether training samples of this step are recorded: the first, the last, and evenly between."""
    every = max(1, total_steps // _RECORDED_STEPS)
    return step in (1, total_steps) or step % every == 0


def chosen_responses(groups: Sequence[int], scores: Sequence[float | None]) -> list[int]:
    """Choose the responses of a training step that are recorded: the best and the worst of the first prompts.

    Args:
        groups: for each response, which prompt of the step it answers; responses to one prompt are adjacent.
        scores: of each response; one without a score (None) counts as the worst.

    Returns:
        indices of responses; one for a prompt whose responses score alike.
    """

    def value(index: int) -> float:
        score = scores[index]
        return -math.inf if score is None else score

    chosen: list[int] = []
    for _, same in islice(groupby(range(len(groups)), key=groups.__getitem__), _RECORDED_PROMPTS):
        indices = list(same)
        best = max(indices, key=value)
        worst = min(indices, key=value)
        chosen += [best] if scores[best] == scores[worst] else [best, worst]
    return chosen


def read_samples(path: Path) -> list[TextSample]:
    """Read samples.jsonl in order of steps.

    A resumed run repeats steps: a line discards all lines of later steps before it, and replaces the line of the same
    step and prompt; in training, where a prompt has several responses, also of the same response. Half-written lines
    are left out.
    """
    samples: dict[tuple[int, str, str, str], TextSample] = {}
    with suppress(FileNotFoundError), open_regular(path) as file:
        for sample in filter(None, map(_parse_sample, last_lines_of(file, _MOST_BYTES, _MOST_LINE_BYTES))):
            while samples and next(reversed(samples))[0] > sample.step:
                samples.popitem()
            response = sample.response if sample.split == TRAIN else ""
            samples[sample.step, sample.split, sample.prompt, response] = sample
    return list(samples.values())


def excerpts_of_run(samples: Sequence[TextSample]) -> list[ExcerptGroup]:
    """Select what the report of one run shows.

    Validation: the first prompts, each with its responses at the first step, at the last, and at some between.
    Training, whose prompts differ from step to step: the responses at the first step, at the last, and at some between.
    """
    val = [sample for sample in samples if sample.split == VAL]
    train = [sample for sample in samples if sample.split == TRAIN]
    steps = spread(sorted({sample.step for sample in val}), _MOST_STEPS)
    by_prompt = _by_prompt([sample for sample in val if sample.step in steps])
    validation = [
        Excerpt(cut(prompt), cut(found[-1].answer), "Step", _over_time(found))
        for prompt, found in list(by_prompt.items())[:_MOST_PROMPTS]
    ]
    groups = [
        ExcerptGroup("Responses to validation prompts", validation),
        ExcerptGroup("Responses in training, best and worst", _training_excerpts(train)),
    ]
    return [group for group in groups if group.excerpts]


def excerpts_of_runs(named: Sequence[tuple[str, Sequence[TextSample]]]) -> list[ExcerptGroup]:
    """Select validation prompts that at least two runs have answered, each with the runs' last responses."""
    last = [{sample.prompt: sample for sample in samples if sample.split == VAL} for _, samples in named]
    shared = [prompt for each in last for prompt in each if sum(prompt in other for other in last) > 1]
    excerpts = []
    for prompt in list(dict.fromkeys(shared))[:_MOST_PROMPTS]:
        found = [(name, each[prompt]) for (name, _), each in zip(named, last, strict=True) if prompt in each]
        rows = [_row(f"{name}, step {sample.step:,}", sample) for name, sample in found]
        excerpts.append(Excerpt(cut(prompt), cut(found[0][1].answer), "Run", rows))
    return [ExcerptGroup("Responses to validation prompts", excerpts)] if excerpts else []


def spread(steps: Sequence[int], most: int) -> set[int]:
    """Choose at most so many steps, evenly by position, the first and the last among them."""
    if len(steps) <= most:
        return set(steps)
    return {steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)}


def cut(text: str) -> str:
    """Shorten a long text, and tell by how much."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}… ({len(text) - _MOST_CHARACTERS:,} more characters)"


def _training_excerpts(samples: Sequence[TextSample]) -> list[Excerpt]:
    """Choose one prompt for each of some steps, with its recorded responses."""
    steps = spread(sorted({sample.step for sample in samples}), _MOST_STEPS)
    excerpts = []
    for step, found in groupby((s for s in samples if s.step in steps), key=lambda sample: sample.step):
        prompt, same = next(iter(_by_prompt(list(found)).items()))
        rows = [_row(f"{step:,}", sample) for sample in same]
        excerpts.append(Excerpt(cut(prompt), cut(same[0].answer), "Step", rows))
    return excerpts


def _over_time(samples: Sequence[TextSample]) -> list[tuple[str, str, str]]:
    """Return a row for each response that differs from the previous one."""
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


def _parse_sample(line: bytes) -> TextSample | None:
    row = object_of(line)
    if row is None or not is_count(row.get("step")):
        return None
    score = row.get("score")
    return TextSample(
        step=row["step"],
        split=str(row.get("split", VAL)),
        prompt=str(row.get("prompt", "")),
        response=str(row.get("response", "")),
        answer="" if row.get("answer") is None else str(row["answer"]),
        score=float(score) if score is not None and is_number(score) else None,
    )
