"""Losses of policy and critic, token by token, and the weights by which tokens become one number.

A loss here is a tensor over tokens. Its sum, each token weighted by `response_weights`, is the scalar to differentiate;
the weights hold the totals of the whole mini-batch, so the gradient is the same however the mini-batch was split over
ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

LossAgg = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

_MAX_LOG_RATIO = 20.0
"""Ratios stay within e^-20 to e^20, so that none becomes infinite; beyond, a token has no gradient."""


class PolicyLoss(NamedTuple):
    loss_N: torch.Tensor
    """Differentiable in the new log-probabilities; to be made small."""
    clipped_N: torch.Tensor
    """1.0 at tokens where a clip is in force, else 0.0; its mean is the clip fraction."""
    kl_N: torch.Tensor
    """old - new log-probability; its mean estimates KL(old || new). No gradient."""


class Clip(NamedTuple):
    """Bounds of the probability ratio new / old: 1 - low to 1 + high, and c of the dual clip (None: no dual clip)."""

    low: float
    high: float
    c: float | None


def ppo(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None,
) -> PolicyLoss:
    """PPO's clipped objective (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7).

    With clip_high above clip_low it is DAPO's clip-higher (Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 10).
    clip_c, over 1, bounds the ratio where the advantage is negative (dual clip, Ye et al. 2020,
    https://arxiv.org/abs/1912.09729).
    """
    log_ratio_N = logprobs_N - old_logprobs_N
    loss_N, clipped_N = _clipped_objective(_ratio(log_ratio_N), advantages_N, clip_low, clip_high)
    if clip_c is not None:
        bound_N = -advantages_N * clip_c
        over_N = (advantages_N < 0) & (loss_N > bound_N)
        loss_N = torch.where(over_N, bound_N, loss_N)
        clipped_N = clipped_N | over_N
    return PolicyLoss(loss_N, clipped_N.float(), -log_ratio_N.detach())


def gspo(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """GSPO: PPO's clipped objective with one ratio per response, exp(mean of its log ratios) (Zheng et al. 2025,
    https://arxiv.org/abs/2507.18071, eq. 5 and 7).

    In its token form (eq. 14): each token has the value of its response's ratio, and a gradient of its own. With equal
    advantages within a response, and mean over tokens, the gradient is that of the sequence form.
    """
    log_ratio_N = logprobs_N - old_logprobs_N
    token_log_ratio_N = log_ratio_N.detach()
    response_N = torch.arange(len(lengths_B), device=lengths_B.device).repeat_interleave(
        lengths_B, output_size=len(logprobs_N)
    )
    sums_B = token_log_ratio_N.new_zeros(len(lengths_B)).index_add_(0, response_N, token_log_ratio_N)
    means_B = sums_B / lengths_B
    # The value is the mean, the gradient the token's. In brackets a 0 that is exact, or rounding would drown the mean.
    own_log_ratio_N = means_B[response_N] + (logprobs_N - logprobs_N.detach())
    loss_N, clipped_N = _clipped_objective(_ratio(own_log_ratio_N), advantages_N, clip_low, clip_high)
    return PolicyLoss(loss_N, clipped_N.float(), -token_log_ratio_N)


def cispo(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """CISPO: REINFORCE weighted by the clipped ratio, which has no gradient itself (MiniMax-M1, 2025,
    https://arxiv.org/abs/2506.13585, eq. 4 and 5).

    Every token keeps a gradient, also where its ratio is clipped. clip_low of 1 is no lower bound.
    """
    log_ratio_N = (logprobs_N - old_logprobs_N).detach()
    ratio_N = _ratio(log_ratio_N)
    weight_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(-weight_N * advantages_N * logprobs_N, (weight_N != ratio_N).float(), -log_ratio_N)


POLICY_LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Clip], PolicyLoss]] = {
    "ppo": lambda logprobs_N, old_logprobs_N, advantages_N, lengths_B, clip: ppo(
        logprobs_N, old_logprobs_N, advantages_N, clip_low=clip.low, clip_high=clip.high, clip_c=clip.c
    ),
    "gspo": lambda logprobs_N, old_logprobs_N, advantages_N, lengths_B, clip: gspo(
        logprobs_N, old_logprobs_N, advantages_N, lengths_B, clip_low=clip.low, clip_high=clip.high
    ),
    "cispo": lambda logprobs_N, old_logprobs_N, advantages_N, lengths_B, clip: cispo(
        logprobs_N, old_logprobs_N, advantages_N, clip_low=clip.low, clip_high=clip.high
    ),
}
"""By the names of AlgorithmConfig.loss: (logprobs_N, old_logprobs_N, advantages_N, lengths_B, clip) -> PolicyLoss."""


class ValueLoss(NamedTuple):
    loss_N: torch.Tensor
    clipped_N: torch.Tensor
    """1.0 at tokens whose clipped error is the larger one, else 0.0."""


def value(values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip: float | None) -> ValueLoss:
    """Half the squared error of the critic, or of its value held within `clip` of the old one where that is larger.

    The clipping is from PPO's reference implementation (Engstrom et al. 2020, https://arxiv.org/abs/2005.12729).
    """
    errors_N = (values_N - returns_N).square()
    if clip is None:
        return ValueLoss(0.5 * errors_N, torch.zeros_like(errors_N))
    held_N = values_N.clamp(old_values_N - clip, old_values_N + clip)
    held_errors_N = (held_N - returns_N).square()
    return ValueLoss(0.5 * torch.maximum(errors_N, held_errors_N), (held_errors_N > errors_N).float())


def explained_variance(values_N: torch.Tensor, returns_N: torch.Tensor) -> float:
    """1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for one that knows the mean alone.

    NaN where the returns are all alike.
    """
    returns_N = returns_N.double()
    variance = float(returns_N.var(correction=0))
    if variance == 0.0:
        return float("nan")
    return 1.0 - float((returns_N - values_N).var(correction=0)) / variance


def response_weights(
    lengths_B: torch.Tensor, mode: LossAgg, max_length: int, total_tokens: int, total_responses: int
) -> torch.Tensor:
    """What one token of each response weighs in the loss: [B].

    token-mean is DAPO's (Yu et al. 2025, https://arxiv.org/abs/2503.14476), seq-mean-token-mean that of GRPO
    (https://arxiv.org/abs/2402.03300) and GSPO, seq-mean-token-sum-norm Dr. GRPO's (Liu et al. 2025,
    https://arxiv.org/abs/2503.20783).

    Args:
        lengths_B: of the responses at hand.
        max_length: longest response that is allowed, in tokens.
        total_tokens: tokens of the whole mini-batch, over all ranks and micro-batches.
        total_responses: responses of the whole mini-batch.
    """
    ones_B = torch.ones_like(lengths_B, dtype=torch.float32)
    weights: dict[LossAgg, torch.Tensor] = {
        "token-mean": ones_B / total_tokens,
        "seq-mean-token-mean": ones_B / lengths_B / total_responses,
        "seq-mean-token-sum-norm": ones_B / (max_length * total_responses),
    }
    return weights[mode]


def _ratio(log_ratio_N: torch.Tensor) -> torch.Tensor:
    return log_ratio_N.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _clipped_objective(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(ratio * A, clip(ratio) * A), and where the second is smaller: there the gradient is 0."""
    free_N = -advantages_N * ratio_N
    held_N = -advantages_N * ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(free_N, held_N), held_N > free_N
