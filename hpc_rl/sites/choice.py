"""The options in which clusters differ, and a search for those that a cluster accepts. Pure functions.

Plugins of a site (cli_filter, job_submit) refuse jobs for reasons that no program of Slurm lists. The search therefore
asks sbatch: it changes the options that a refusal mentions. If sbatch then refuses the job for a new reason, the search
goes on from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MOST_QUESTIONS = 60
"""Test submissions of one search."""


@dataclass(frozen=True)
class Choice:
    """Options of jobs on a cluster, as keys of `slurm` in a profile."""

    time: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpu_option: str | None = None
    """None for a partition without GPUs."""
    gpu_type: str | None = None
    mem_option: str = "mem"
    exclusive: bool = False
    leave_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dimension:
    """Options that are changed together."""

    words: str
    """Regular expression for refusals that are about these options."""
    alternatives: Sequence[Mapping[str, Any]]
    """Fields of a Choice -> values, the best first."""
    only_if_mentioned: bool = False
    """Whether to try them only for such refusals."""


def search(
    first: Choice, dimensions: Sequence[Dimension], refusal: Callable[[Choice], str | None]
) -> tuple[Choice, str | None]:
    """Search for a choice that the cluster accepts, with as few questions as possible.

    Args:
        refusal: asks the cluster; returns its message, or None if it accepts.

    Returns:
        the accepted choice and None; or the first choice and the message of its refusal.
    """
    answers: dict[Choice, str | None] = {}

    def ask(choice: Choice) -> str | None:
        if choice not in answers:
            answers[choice] = refusal(choice)
        return answers[choice]

    seen: set[str] = set()
    waiting = [first]
    while waiting:
        choice = waiting.pop()
        message = ask(choice)
        if message is None:
            return choice, None
        seen.add(_kind(message))
        mentioned = [one for one in dimensions if re.search(one.words, message, re.IGNORECASE)]
        others = [one for one in dimensions if one not in mentioned and not one.only_if_mentioned]
        for tried in (mentioned, others):
            further = []
            for changed in _neighbours(choice, tried):
                if len(answers) >= MOST_QUESTIONS:
                    return first, answers[first]
                answer = ask(changed)
                if answer is None:
                    return changed, None
                if _kind(answer) not in seen:
                    further.append(changed)
            waiting += reversed(further)  # the best one is taken next
            if further:
                break
    return first, answers[first]


def _neighbours(choice: Choice, dimensions: Sequence[Dimension]) -> Iterator[Choice]:
    """Yield choices that differ in one dimension."""
    for dimension in dimensions:
        for alternative in dimension.alternatives:
            changed = replace(choice, **alternative)
            if changed != choice:
                yield changed


def _kind(message: str) -> str:
    """Return a refusal without numbers, which differ from job to job."""
    return re.sub(r"\d+", "0", message)
