"""The table of loss aggregations: how the losses of a mini-batch's tokens become one number.

An aggregation returns one weight per response. The scalar to differentiate is the sum over tokens of weight times loss.
The weights use the totals of the whole mini-batch, so the gradient does not depend on how the mini-batch is split over
ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MiniBatchTotals:
    """Totals of one mini-batch, over all ranks and micro-batches."""

    tokens: int
    """Response tokens."""
    responses: int
    max_length: int
    """Longest response that the configuration allows, in tokens."""


def token_mean(lengths_B: torch.Tensor, totals: MiniBatchTotals) -> torch.Tensor:
    """Average over all tokens (DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476): weights [B]."""
    return _ones(lengths_B) / totals.tokens


def seq_mean_token_mean(lengths_B: torch.Tensor, totals: MiniBatchTotals) -> torch.Tensor:
    """Average over responses of the mean over tokens (GRPO, https://arxiv.org/abs/2402.03300; GSPO): weights [B]."""
    return _ones(lengths_B) / lengths_B / totals.responses


def seq_mean_token_sum_norm(lengths_B: torch.Tensor, totals: MiniBatchTotals) -> torch.Tensor:
    """Average over responses of the sum over tokens divided by the longest length allowed (Dr. GRPO, Liu et al. 2025,
    https://arxiv.org/abs/2503.20783): weights [B]."""
    return _ones(lengths_B) / (totals.max_length * totals.responses)


def seq_mean_token_sum(lengths_B: torch.Tensor, totals: MiniBatchTotals) -> torch.Tensor:
    """Average over responses of the sum over tokens, as in the policy gradient theorem (Sutton et al. 1999): weights
    [B]. The size of an update grows with the responses' lengths."""
    return _ones(lengths_B) / totals.responses


def _ones(lengths_B: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(lengths_B, dtype=torch.float32)


LOSS_AGGREGATIONS: dict[str, Callable[[torch.Tensor, MiniBatchTotals], torch.Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}
"""algorithm.loss_agg -> aggregation: (lengths_B, totals) -> weight of one token of each response [B]."""
