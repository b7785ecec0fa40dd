"""The difference between the engine that sampled and the model that trains, measured and corrected."""

from __future__ import annotations

from typing import NamedTuple

import torch


def tis_weights(logprobs_N: torch.Tensor, rollout_logprobs_N: torch.Tensor, cap: float) -> torch.Tensor:
    """min(p_trainer / p_rollout, cap) of each token, by which its loss is weighted; no gradient.

    Truncated importance sampling (Ionides 2008, https://doi.org/10.1198/106186008X320456), token by token.

    Args:
        logprobs_N: of the trainer, with the weights that the engine sampled with.
        rollout_logprobs_N: as the engine reported them.
    """
    return (logprobs_N - rollout_logprobs_N).detach().exp().clamp(max=cap)


class ProbabilityDifference(NamedTuple):
    mean: float
    max: float
    std: float


def probability_difference(logprobs_N: torch.Tensor, rollout_logprobs_N: torch.Tensor) -> ProbabilityDifference:
    """|p_trainer - p_rollout| over the sampled tokens, of which there is at least one."""
    difference_N = (logprobs_N.detach().exp() - rollout_logprobs_N.detach().exp()).abs()
    return ProbabilityDifference(
        float(difference_N.mean()), float(difference_N.max()), float(difference_N.std(correction=0))
    )
