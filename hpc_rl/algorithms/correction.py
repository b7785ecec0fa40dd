"""The difference between the probabilities of the engine and those of the trainer: a measure and a correction."""

from __future__ import annotations

from typing import NamedTuple

import torch

PROBS_DIFF_WARNING = 0.01
"""Mean difference of probabilities that rounding does not explain."""
_MAX_LOG_RATIO = 20.0
"""Ratios are limited to e^-20 to e^20, so that none is infinite."""


def importance_ratios(
    logprobs_N: torch.Tensor, rollout_logprobs_N: torch.Tensor, lengths_B: torch.Tensor, level: str
) -> torch.Tensor:
    """Return p_trainer / p_rollout at each token, [N]. No gradient.

    Args:
        logprobs_N: from the trainer, with the weights that the engine sampled with.
        rollout_logprobs_N: from the engine.
        level: `token` for the token's own ratio; `sequence` for the product over its response, the ratio of the whole
            response; `geometric` for the geometric mean over its response, which does not depend on the length.
    """
    log_ratio_N = (logprobs_N - rollout_logprobs_N).detach()
    if level != "token":
        response_N = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
        sums_B = torch.zeros(len(lengths_B), dtype=torch.float64).index_add_(0, response_N, log_ratio_N.double())
        means_B = sums_B / lengths_B if level == "geometric" else sums_B
        log_ratio_N = means_B[response_N].to(log_ratio_N.dtype)
    return log_ratio_N.clamp_(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp_()


def correction_weights(ratios_N: torch.Tensor, cap: float | None, bounds: tuple[float, float] | None) -> torch.Tensor:
    """Return the weight of each token's loss, [N].

    With a cap it is min(ratio, cap): truncated importance sampling (Ionides 2008,
    https://doi.org/10.1198/106186008X320456); otherwise 1. Beyond the bounds it is 0: rejection, because there the
    estimate depends on few samples.
    """
    weights_N = torch.ones_like(ratios_N) if cap is None else ratios_N.clamp(max=cap)
    if bounds is not None:
        weights_N = weights_N * ((ratios_N >= bounds[0]) & (ratios_N <= bounds[1]))
    return weights_N


class WeightStatistics(NamedTuple):
    """Statistics of the weights of a correction over tokens."""

    mean: float
    capped: float
    """Share of the tokens whose ratio is over the cap."""
    rejected: float
    """Share of the tokens with the weight 0."""
    ess: float
    """Effective sample size as a share of the tokens, (sum w)^2 / (N sum w^2): Kish 1965, Survey Sampling, 11.7."""


def weight_statistics(
    ratios_N: torch.Tensor, cap: float | None, bounds: tuple[float, float] | None
) -> WeightStatistics:
    """Measure the weights that `correction_weights` returns; N is at least 1."""
    weights_N = correction_weights(ratios_N, cap, bounds).double()
    total, squares = float(weights_N.sum()), float(weights_N.square().sum())
    return WeightStatistics(
        mean=total / len(weights_N),
        capped=0.0 if cap is None else float((ratios_N > cap).double().mean()),
        rejected=float((weights_N == 0).double().mean()),
        ess=total * total / (len(weights_N) * squares) if squares else 0.0,
    )


class ProbabilityDifference(NamedTuple):
    """Statistics of |p_trainer - p_rollout| over tokens."""

    mean: float
    max: float
    std: float


def probability_difference(logprobs_N: torch.Tensor, rollout_logprobs_N: torch.Tensor) -> ProbabilityDifference:
    """Compare the probabilities of the sampled tokens; N is at least 1."""
    difference_N = logprobs_N.detach().exp().sub_(rollout_logprobs_N.detach().exp()).abs_()
    return ProbabilityDifference(
        float(difference_N.mean()), float(difference_N.max()), float(difference_N.std(correction=0))
    )
