"""How far the engines' work may be ahead of the training, and how far it was (rollout.staleness).

A batch is generated ahead of time only if it will be at most so many steps old when it is trained. This bounds the
prompts that may have been drawn: with B prompts per batch, i trained steps and staleness n, at most (i + n + 1) B
(AReaL, https://arxiv.org/abs/2505.24298, section 5.1). Batches are trained in the order of the data, so no response
becomes older, and none has to be dropped for its age.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_rl.rl.rollout.engine import Completion


def batches_ahead(trained: int, taken: int, staleness: int, total: int) -> int:
    """Return how many batches may be generated or wait to be trained.

    Args:
        trained: steps whose update is in the engines' weights.
        taken: batches that the training has been given, with those of earlier attempts.
        total: steps of the run.
    """
    return max(0, min(trained + staleness + 1, total) - taken)


def token_ages(completions: Sequence[Completion], version: int) -> NDArray[np.int64]:
    """Return the age of each sampled token [N]: the number of weight updates since it was sampled.

    Args:
        version: number of weight updates so far.
    """
    ages = [_ages(completion, version) for completion in completions]
    return np.concatenate(ages) if ages else np.zeros(0, np.int64)


def _ages(completion: Completion, version: int) -> NDArray[np.int64]:
    versions, tokens = np.array(completion.spans, np.int64).reshape(-1, 2).T
    ages_R = version - np.repeat(versions, tokens)
    return ages_R if completion.mask is None else ages_R[completion.mask]


def staleness_metrics(completions: Sequence[Completion], version: int) -> dict[str, float]:
    """Measure a batch at the time of its training.

    Args:
        version: number of weight updates so far.
    """
    ages_N = token_ages(completions, version)
    return {
        "rollout/staleness/mean": float(ages_N.mean()),
        "rollout/staleness/max": float(ages_N.max()),
        "rollout/versions/mean": float(np.mean([len(completion.spans) for completion in completions])),
    }
