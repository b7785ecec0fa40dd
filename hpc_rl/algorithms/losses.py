"""Losses of the policy and the critic, one number per token.

`aggregation.py` has the weights by which the losses of tokens become one number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_MAX_LOG_RATIO = 20.0
"""Ratios are limited to e^-20 to e^20, so that none is infinite; a token beyond the limit has no gradient."""


class Clip(NamedTuple):
    """Bounds of the probability ratio new / old: from 1 - low to 1 + high. c is the bound of the dual clip, or None.

    They are the options algorithm.clip_ratio_low, clip_ratio_high and clip_ratio_c.
    """

    low: float
    high: float
    c: float | None


class PolicyBatch(NamedTuple):
    """The input of a policy loss: the response tokens of one micro-batch, which holds whole responses."""

    logprobs_N: torch.Tensor
    """Under the policy that is trained; differentiable."""
    old_logprobs_N: torch.Tensor
    """Under the policy before the step's first update."""
    advantages_N: torch.Tensor
    lengths_B: torch.Tensor
    clip: Clip


class PolicyLoss(NamedTuple):
    """The output of a policy loss."""

    loss_N: torch.Tensor
    """To be minimised; differentiable in the new log-probabilities."""
    clipped_N: torch.Tensor
    """1.0 at tokens at which a clip is active, else 0.0; its mean is the clip fraction."""
    kl_N: torch.Tensor
    """old - new log-probability; its mean estimates KL(old || new). No gradient."""


def ppo(batch: PolicyBatch) -> PolicyLoss:
    """Compute PPO's clipped objective (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7).

    With clip.high above clip.low this is DAPO's clip-higher (Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 10).
    clip.c, which exceeds 1, bounds the ratio at tokens with a negative advantage (dual clip, Ye et al. 2020,
    https://arxiv.org/abs/1912.09729).
    """
    logprobs_N, old_logprobs_N, advantages_N, _, clip = batch
    log_ratio_N = logprobs_N - old_logprobs_N
    loss_N, clipped_N = _clipped_objective(_ratio(log_ratio_N), advantages_N, clip)
    if clip.c is not None:
        bound_N = -advantages_N * clip.c
        over_N = (advantages_N < 0) & (loss_N > bound_N)
        loss_N = torch.where(over_N, bound_N, loss_N)
        clipped_N = clipped_N | over_N
    return PolicyLoss(loss_N, clipped_N.float(), -log_ratio_N.detach())


def gspo(batch: PolicyBatch) -> PolicyLoss:
    """Compute GSPO: PPO's clipped objective with one ratio per response, exp(mean of its tokens' log ratios) (Zheng et
    al. 2025, https://arxiv.org/abs/2507.18071, eq. 5 and 7).

    This is the token form (eq. 14): each token has the value of its response's ratio and its own gradient. If
    advantages are equal within each response and losses are averaged over tokens, the gradient equals that of the
    sequence form.
    """
    logprobs_N, old_logprobs_N, advantages_N, lengths_B, clip = batch
    log_ratio_N = logprobs_N - old_logprobs_N
    token_log_ratio_N = log_ratio_N.detach()
    response_N = torch.arange(len(lengths_B), device=lengths_B.device).repeat_interleave(
        lengths_B, output_size=len(logprobs_N)
    )
    sums_B = token_log_ratio_N.new_zeros(len(lengths_B)).index_add_(0, response_N, token_log_ratio_N)
    means_B = sums_B / lengths_B
    # The value is the response's mean and the gradient is the token's: the term in parentheses is exactly 0. Added to
    # the log-probabilities first, the mean would be lost to rounding.
    own_log_ratio_N = means_B[response_N] + (logprobs_N - logprobs_N.detach())
    loss_N, clipped_N = _clipped_objective(_ratio(own_log_ratio_N), advantages_N, clip)
    return PolicyLoss(loss_N, clipped_N.float(), -token_log_ratio_N)


def cispo(batch: PolicyBatch) -> PolicyLoss:
    """Compute CISPO: REINFORCE weighted by the clipped ratio, which itself has no gradient (MiniMax-M1, 2025,
    https://arxiv.org/abs/2506.13585, eq. 4 and 5).

    Every token keeps a gradient, even if its ratio is clipped. clip.low = 1 means no lower bound.
    """
    logprobs_N, old_logprobs_N, advantages_N, _, clip = batch
    log_ratio_N = (logprobs_N - old_logprobs_N).detach()
    ratio_N = _ratio(log_ratio_N)
    weight_N = ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high)
    return PolicyLoss(-weight_N * advantages_N * logprobs_N, (weight_N != ratio_N).float(), -log_ratio_N)


class ValueLoss(NamedTuple):
    """The critic's loss."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor
    """1.0 at tokens whose clipped error is the larger one, else 0.0."""


def value(values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip: float | None) -> ValueLoss:
    """Compute half the squared error of the critic's value, or of the value limited to `clip` around the old one,
    whichever is larger.

    The clipping is that of PPO's reference implementation (Engstrom et al. 2020, https://arxiv.org/abs/2005.12729).
    """
    errors_N = (values_N - returns_N).square()
    if clip is None:
        return ValueLoss(0.5 * errors_N, torch.zeros_like(errors_N))
    clipped_values_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
    clipped_errors_N = (clipped_values_N - returns_N).square()
    return ValueLoss(0.5 * torch.maximum(errors_N, clipped_errors_N), (clipped_errors_N > errors_N).float())


def explained_variance(values_N: torch.Tensor, returns_N: torch.Tensor) -> float:
    """Return 1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for one that predicts the mean.

    NaN if all returns are equal.
    """
    returns_N = returns_N.double()
    variance = float(returns_N.var(correction=0))
    if variance == 0.0:
        return float("nan")
    return 1.0 - float((returns_N - values_N).var(correction=0)) / variance


def _ratio(log_ratio_N: torch.Tensor) -> torch.Tensor:
    return log_ratio_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _clipped_objective(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip: Clip
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -min(ratio * A, clipped ratio * A), and whether the second is smaller: there the gradient is 0."""
    free_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high)
    return torch.maximum(free_N, clipped_N), clipped_N > free_N
