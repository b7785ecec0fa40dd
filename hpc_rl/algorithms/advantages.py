"""Formulas of advantages: how much better than expected each response, or each token, was.

Means and deviations are computed in float64, so that equal scores have an advantage of exactly 0. In float32 a rounding
error would remain, and the division by the deviation would amplify it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

_EPS = 1e-6
"""Keeps quotients finite if a deviation is 0."""
_WHITENING_EPS = 1e-8
"""Added to the variance when whitening: deviations far below 1e-4 are noise and are not amplified."""


def gae(
    rewards_N: torch.Tensor, values_N: torch.Tensor, lengths_B: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalized advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16).

    The value after the last token is 0, because the response ends there.

    Returns:
        advantages [N], not whitened, and the critic's targets (advantages + values) [N].
    """
    last_B = lengths_B.cumsum(0) - 1
    errors_N = rewards_N - values_N
    errors_N[:-1].add_(values_N[1:], alpha=gamma)
    errors_N[last_B] = rewards_N[last_B] - values_N[last_B]
    advantages_N = _discounted_sums(errors_N, lengths_B, gamma * lam)
    return advantages_N, advantages_N + values_N


def grpo(scores_B: torch.Tensor, groups_B: torch.Tensor, scale: str = "group") -> torch.Tensor:
    """Return (score - mean) / (standard deviation + 1e-6) within a group (DeepSeekMath,
    https://arxiv.org/abs/2402.03300).

    The deviation is the sample's (n - 1 in the denominator). A group of one, or with equal scores, gets 0.

    Args:
        scale: `group`; `batch` to divide by the deviation of all scores, which weights easy and hard prompts alike
            (Liu et al. 2025, https://arxiv.org/abs/2508.08221); `none` not to divide.
    """
    centred_B, index_B, sizes_G = _centre(scores_B, groups_B)
    if scale == "none":
        return centred_B.float()
    if scale == "batch":
        deviation = scores_B.double().std() if len(scores_B) > 1 else 0.0
        return (centred_B / (deviation + _EPS)).float()
    return (centred_B / (_deviations(centred_B, index_B, sizes_G)[index_B] + _EPS)).float()


def dr_grpo(scores_B: torch.Tensor, groups_B: torch.Tensor) -> torch.Tensor:
    """Return score - mean within a group: GRPO without its bias to easy and hard prompts (Dr. GRPO, Liu et al. 2025,
    https://arxiv.org/abs/2503.20783)."""
    return _centre(scores_B, groups_B)[0].float()


def rloo(scores_B: torch.Tensor, groups_B: torch.Tensor) -> torch.Tensor:
    """Return score - mean of the group's other scores (REINFORCE leave-one-out, Ahmadian et al. 2024,
    https://arxiv.org/abs/2402.14740). A response that is alone in its group gets 0.
    """
    centred_B, index_B, sizes_G = _centre(scores_B, groups_B)
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
    return (centred_B * (sizes_G / (sizes_G - 1).clamp(min=1))[index_B]).float()


def remax(rewards_N: torch.Tensor, lengths_B: torch.Tensor, greedy_scores_B: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rewards from each token on, minus the score of the greedy response to the same prompt:
    [N] (ReMax, Li et al. 2024, https://arxiv.org/abs/2310.10505).

    The sum differs between the tokens of a response only if the KL penalty is part of the reward: a token has no
    influence on the divergence before it.
    """
    return _discounted_sums(rewards_N, lengths_B, 1.0) - to_tokens(greedy_scores_B, lengths_B)


def reinforce_pp(rewards_N: torch.Tensor, lengths_B: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the discounted sum of future rewards, whitened over the batch: [N] (REINFORCE++, Hu 2025,
    https://arxiv.org/abs/2501.03262)."""
    return whiten(_discounted_sums(rewards_N, lengths_B, gamma))


def reinforce_pp_baseline(scores_B: torch.Tensor, groups_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return score - mean within a group, at every token, whitened over the batch: [N] (REINFORCE++-baseline, Hu
    2025, https://arxiv.org/abs/2501.03262)."""
    return whiten(to_tokens(dr_grpo(scores_B, groups_B), lengths_B))


def opd(teacher_logprobs_N: torch.Tensor, logprobs_N: torch.Tensor, coeff: float) -> torch.Tensor:
    """Return coeff * (log p(teacher) - log p(policy)) at each token: [N].

    Its expectation is the negative KL(policy || teacher) of the next token. Later tokens are not discounted into it
    (on-policy distillation; Agarwal et al. 2024, https://arxiv.org/abs/2306.13649, and
    https://thinkingmachines.ai/blog/on-policy-distillation).
    """
    return coeff * (teacher_logprobs_N - logprobs_N)


def whiten(values_N: torch.Tensor) -> torch.Tensor:
    """Shift and scale values to mean 0 and variance 1 over all tokens of the batch: [N].

    The divisor is sqrt(variance + 1e-8), so that differences far below 1e-4, which are noise of equal values, stay
    small.
    """
    if not len(values_N):
        return values_N
    centred_N = values_N - float(values_N.numpy().mean(dtype=np.float64))
    variance = float(np.square(centred_N.numpy()).mean(dtype=np.float64))
    return centred_N.div_(math.sqrt(variance + _WHITENING_EPS))


def to_tokens(values_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Repeat each response's value at all of its tokens: [N]."""
    return torch.from_numpy(np.repeat(values_B.numpy(), lengths_B.numpy()))


def total_of_each(values_N: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values of each response, which has a token or more: [B]."""
    starts_B = (lengths_B.cumsum(0) - lengths_B).numpy()
    return torch.from_numpy(np.add.reduceat(values_N.numpy(), starts_B)) if len(starts_B) else values_N


def token_rewards(scores_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Place each response's score at its last token: [N], the tokens of all responses concatenated; 0 elsewhere."""
    ends_B = lengths_B.cumsum(0)
    return scores_B.new_zeros(int(ends_B[-1])).index_copy_(0, ends_B - 1, scores_B)


def informative_groups(scores_B: torch.Tensor, groups_B: torch.Tensor) -> torch.Tensor:
    """Return bool [B]: whether the scores of the response's group differ (DAPO's dynamic sampling, Yu et al. 2025,
    https://arxiv.org/abs/2503.14476, eq. 11). All advantages of the other groups are 0, so they teach nothing. Scores
    that are NaN, which are missing, do not count."""
    groups_G, index_B = torch.unique(groups_B, return_inverse=True)
    start_G = scores_B.new_zeros(len(groups_G))
    highest_G = start_G.scatter_reduce(0, index_B, scores_B.nan_to_num(-torch.inf), "amax", include_self=False)
    lowest_G = start_G.scatter_reduce(0, index_B, scores_B.nan_to_num(torch.inf), "amin", include_self=False)
    return (highest_G > lowest_G)[index_B]


def group_deviations(scores_B: torch.Tensor, groups_B: torch.Tensor) -> torch.Tensor:
    """Return the sample standard deviation of each group's scores, float64; groups of one response are left out. It is
    exactly 0 if all scores of the group are equal."""
    centred_B, index_B, sizes_G = _centre(scores_B, groups_B)
    return _deviations(centred_B, index_B, sizes_G)[sizes_G > 1]


def overlong_penalty(lengths_B: torch.Tensor, max_length: int, buffer: int, penalty: float) -> torch.Tensor:
    """Return DAPO's soft overlong punishment (Yu et al. 2025, https://arxiv.org/abs/2503.14476, eq. 13): [B], never
    positive.

    It is 0 up to max_length - buffer tokens, then falls linearly to -penalty at max_length.

    Args:
        buffer: tokens; 0 for no penalty.
    """
    if buffer == 0:
        return torch.zeros_like(lengths_B, dtype=torch.float32)
    return penalty * ((max_length - buffer - lengths_B) / buffer).clamp(-1.0, 0.0)


def _centre(scores_B: torch.Tensor, groups_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return score - mean of its group [B] (float64), the index of each response's group [B], and group sizes [G]."""
    _, index_B, sizes_G = torch.unique(groups_B, return_inverse=True, return_counts=True)
    scores_B = scores_B.double()
    means_G = torch.bincount(index_B, weights=scores_B) / sizes_G
    return scores_B - means_G[index_B], index_B, sizes_G


def _deviations(centred_B: torch.Tensor, index_B: torch.Tensor, sizes_G: torch.Tensor) -> torch.Tensor:
    """Return the sample standard deviation of each group [G]; 0 for a group of one."""
    return (torch.bincount(index_B, weights=centred_B.square()) / (sizes_G - 1).clamp(min=1)).sqrt()


def _discounted_sums(values_N: torch.Tensor, lengths_B: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the sum over k of factor^k * values[t + k] for every token t of a response: [N]."""
    lengths = lengths_B.tolist()
    if not lengths:
        return values_N
    # Time is the first dimension, so that each step adds contiguous rows.
    sums_TB = pad_sequence(list(torch.split(values_N, lengths)), batch_first=True).t().contiguous()
    for t in range(len(sums_TB) - 2, -1, -1):
        sums_TB[t].add_(sums_TB[t + 1], alpha=factor)
    rows = sums_TB.t().contiguous().unbind()
    return torch.cat([row_T[:length] for row_T, length in zip(rows, lengths, strict=True)])
