"""Estimates from n responses to each of several prompts: pass@k, maj@k, and confidence intervals. Pure functions.

Shape suffixes: P prompts, n responses to one prompt, R resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 1000
VOTES = 100
"""Random subsets from which maj@k is estimated if k is smaller than n."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts."""

    value: float
    low: float
    """Lower end of the confidence interval."""
    high: float
    prompts: int
    """Prompts that it is a mean of."""


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k responses is correct.

    1 - C(n - c, k) / C(n, k), of Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1
    (https://arxiv.org/abs/2107.03374), as a product that does not overflow.

    Args:
        n: responses to the prompt.
        correct: how many of them are correct.
        k: at most n.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} of {n} responses, {correct} of which are correct, is not defined")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def majority_is_correct(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """Return how correct the most frequent answer is: 1 or 0, or between if several answers are equally frequent.

    Self-consistency: Wang et al. 2022 (https://arxiv.org/abs/2203.11171).

    Args:
        answers: of the responses; None for a response without one, which has no vote. If none has one, the result is 0.
        correct: whether each response is correct.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    right = {answer for answer, is_right in zip(answers, correct, strict=True) if is_right}
    return sum(winner in right for winner in winners) / len(winners)


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int, rng: np.random.Generator) -> float:
    """Return the probability that the majority of k of the n responses is correct.

    With k = n it is exact; otherwise it is the mean over VOTES random subsets of k responses.
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} of {n} responses is not defined")
    if k == n:
        return majority_is_correct(answers, correct)
    subsets = [rng.choice(n, k, replace=False) for _ in range(VOTES)]
    return float(np.mean([majority_is_correct([answers[i] for i in s], [correct[i] for i in s]) for s in subsets]))


def estimate(values: Sequence[float], rng: np.random.Generator) -> Estimate:
    """Return the mean of one value per prompt, with a percentile bootstrap interval over prompts.

    Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13: RESAMPLES samples of P prompts with
    replacement.

    Args:
        values: at least one.
    """
    values_P: NDArray[np.float64] = np.asarray(values, np.float64)
    if not len(values_P):
        raise ValueError("there is no value to take the mean of")
    means_R = [values_P[rng.integers(len(values_P), size=len(values_P))].mean() for _ in range(RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means_R, [tail, 1 - tail])
    return Estimate(float(values_P.mean()), float(low), float(high), len(values_P))


def sizes(n: int) -> list[int]:
    """Return the values of k for n responses: the powers of 2 below n, and n."""
    return [*(2**power for power in range(n.bit_length()) if 2**power < n), n]
