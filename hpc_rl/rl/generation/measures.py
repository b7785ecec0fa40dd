"""What the finished blocks of a run measured, together: each number counts all responses so far, of every attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.converse.transcripts import Conversed
from hpc_rl.rl.generation.responses import FAILED, TRUNCATED, Measures, finish_of
from hpc_rl.rl.loop.metrics import conversation_metrics
from hpc_rl.rl.rollout.engine import Completion

REWARD_ERRORS = "generate/reward_errors"
_ADDED = (REWARD_ERRORS, "environment/errors")
"""Numbers of responses, which are added. The names of maxima end in /max. All others are means."""


def measure(completions: Sequence[Completion], scores: Scores | None) -> Measures:
    """Measure a block: metric -> its value, and the number of responses that have it."""
    lengths = np.array([completion.sampled for completion in completions])
    ends = [end for end in map(finish_of, completions) if end != FAILED]
    conversations = sum(isinstance(completion, Conversed) for completion in completions)
    truncated = sum(end == TRUNCATED for end in ends)
    return {
        "response_length/mean": (float(lengths.mean()), len(lengths)),
        "response_length/clip_ratio": (truncated / max(len(ends), 1), len(ends)),
        **({} if scores is None else _score_measures(scores)),
        **{name: (value, conversations) for name, value in conversation_metrics(completions).items()},
    }


def _score_measures(scores: Scores) -> Measures:
    """Measure the scores of the responses that have one, the failed rewards, and the parts of the reward."""
    found = scores.values[~np.isnan(scores.values)]
    counts = Counter(name for components in scores.components for name in components)
    means = {f"reward/{name}": (mean, counts[name]) for name, mean in scores.component_means().items()}
    mean = {"generate/score": (float(found.mean(dtype="float64")), len(found))} if len(found) else {}
    return {**mean, REWARD_ERRORS: (float(len(scores.errors)), len(scores.values)), **means}


def combined(blocks: Iterable[Measures]) -> Measures:
    """Return the measures of all responses of some blocks."""
    found: dict[str, tuple[float, int]] = {}
    for block in blocks:
        for name, (value, count) in block.items():
            before, counted = found.get(name, (value, 0))
            both = counted + count
            if name in _ADDED:
                value += before if counted else 0.0
            elif name.endswith("/max"):
                value = max(value, before)
            elif both:
                value = (before * counted + value * count) / both
            found[name] = (value, both)
    return found


def as_metrics(measures: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    return {name: value for name, (value, _) in measures.items()}
