"""The difference between the probabilities of the engine and those of the trainer: a measure and a correction."""

from __future__ import annotations

from typing import NamedTuple

import torch


def tis_weights(logprobs_N: torch.Tensor, rollout_logprobs_N: torch.Tensor, cap: float) -> torch.Tensor:
    """Return min(p_trainer / p_rollout, cap) for each token: the weight of its loss. No gradient.

    Truncated importance sampling (Ionides 2008, https://doi.org/10.1198/106186008X320456), token by token.

    Args:
        logprobs_N: from the trainer, with the weights that the engine sampled with.
        rollout_logprobs_N: from the engine.
    """
    return (logprobs_N - rollout_logprobs_N).detach().exp().clamp(max=cap)


class ProbabilityDifference(NamedTuple):
    """Statistics of |p_trainer - p_rollout| over tokens."""

    mean: float
    max: float
    std: float


def probability_difference(logprobs_N: torch.Tensor, rollout_logprobs_N: torch.Tensor) -> ProbabilityDifference:
    """Compare the probabilities of the sampled tokens; N is at least 1."""
    difference_N = (logprobs_N.detach().exp() - rollout_logprobs_N.detach().exp()).abs()
    return ProbabilityDifference(
        float(difference_N.mean()), float(difference_N.max()), float(difference_N.std(correction=0))
    )
