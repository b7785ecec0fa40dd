"""Token sampling in which a response depends on its own seed and not on the batch it is in.

Every step of every response has one uniform number, from a counter-based generator that is keyed by the response's seed
(Philox: Salmon et al., https://doi.org/10.1145/2063384.2063405). The token is the one at which the cumulative
distribution exceeds that number.

Shape suffixes: B rows, G rows of a group, V vocabulary, K candidates (sorted, most probable first), S steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.rl.rollout.engine import Sampling


def uniforms(seeds: Sequence[int], steps: int) -> NDArray[np.float32]:
    """Draw numbers in [0, 1), [len(seeds), S], each row from its own seed."""
    drawn = np.empty((len(seeds), steps), np.float32)
    for row, seed in zip(drawn, seeds, strict=True):
        np.random.Generator(np.random.Philox(key=seed)).random(out=row, dtype=np.float32)
    return drawn


class SamplingGroup(NamedTuple):
    """Rows of a batch whose tokens are drawn in the same way."""

    sampling: Sampling
    """Its max_new_tokens has no meaning."""
    rows_G: torch.Tensor


def groups_of(samplings: Sequence[Sampling], device: torch.device) -> list[SamplingGroup]:
    """Group the rows of a batch, whose samplings may differ. Only max_new_tokens does not matter."""
    distinct = {id(sampling): sampling for sampling in samplings}  # usually one, which many requests share
    ways = {key: replace(sampling, max_new_tokens=1) for key, sampling in distinct.items()}
    if len(set(ways.values())) == 1:
        return [SamplingGroup(next(iter(ways.values())), torch.arange(len(samplings), device=device))]
    found: dict[Sampling, list[int]] = defaultdict(list)
    for row, sampling in enumerate(samplings):
        found[ways[id(sampling)]].append(row)
    return [SamplingGroup(sampling, torch.tensor(rows, device=device)) for sampling, rows in found.items()]


class TokenSampler:
    """Apply the LM head and draw tokens, in buffers that all steps share."""

    def __init__(
        self,
        weight_VH: torch.Tensor,
        rows: int,
        softcap: float | None = None,
        bias_V: torch.Tensor | None = None,
    ) -> None:
        self.weight_VH = weight_VH
        self.bias_V = bias_V
        self.softcap = softcap
        self._logits = weight_VH.new_empty(rows, weight_VH.shape[0], dtype=torch.float32)
        self._scratch = torch.empty_like(self._logits)

    def __call__(
        self, hidden_BH: torch.Tensor, uniform_B: torch.Tensor, groups: Sequence[SamplingGroup]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and log-probabilities as `sample` does. Each row is in one of the groups."""
        logits_BV = self._logits[: hidden_BH.shape[0]]
        if hidden_BH.dtype == torch.float32:
            torch.mm(hidden_BH, self.weight_VH.t(), out=logits_BV)
        else:
            logits_BV.copy_(hidden_BH @ self.weight_VH.t())
        if self.bias_V is not None:
            logits_BV.add_(self.bias_V)
        if self.softcap is not None:
            logits_BV.div_(self.softcap).tanh_().mul_(self.softcap)
        if len(groups) == 1:
            return sample(logits_BV, uniform_B, groups[0].sampling, self._scratch[: hidden_BH.shape[0]])
        token_B = torch.empty_like(uniform_B, dtype=torch.int64)
        logprob_B = torch.empty_like(uniform_B)
        for sampling, rows_G in groups:
            scratch_GV = self._scratch[: len(rows_G)]
            token_B[rows_G], logprob_B[rows_G] = sample(logits_BV[rows_G], uniform_B[rows_G], sampling, scratch_GV)
        return token_B, logprob_B


def sample(
    logits_BV: torch.Tensor, uniform_B: torch.Tensor, sampling: Sampling, scratch_BV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token for each row.

    Args:
        logits_BV: float32; overwritten.
        uniform_B: float32 in [0, 1).
        sampling: how tokens are drawn.
        scratch_BV: float32; overwritten.

    Returns:
        tokens [B], int64, and their log-probabilities [B], float32, under softmax(logits / temperature), or at
        temperature 1 if decoding is greedy. top_k and top_p change them only with sampling.truncated_logprobs, because
        the policy in training has neither.
    """
    if sampling.temperature == 0:
        highest_B, token_B = logits_BV.max(dim=1)
        return token_B, highest_B - logits_BV.logsumexp(dim=1)
    if sampling.temperature != 1:
        logits_BV.div_(sampling.temperature)
    # amax instead of max, which also finds positions and would take longer than everything else here.
    logits_BV.sub_(logits_BV.amax(dim=1, keepdim=True))
    weights_BV = torch.exp(logits_BV, out=scratch_BV)
    if sampling.top_k or sampling.top_p < 1:
        token_B1, kept_B1 = _from_truncated(weights_BV, uniform_B[:, None], sampling)
        total_B1 = kept_B1 if sampling.truncated_logprobs else weights_BV.sum(dim=1, keepdim=True)
    else:
        cumulative_BV = weights_BV.cumsum_(dim=1)
        total_B1 = cumulative_BV[:, -1:]
        token_B1 = _first_above(cumulative_BV, uniform_B[:, None] * total_B1)
    return token_B1[:, 0], (logits_BV.gather(1, token_B1) - total_B1.log())[:, 0]


def _from_truncated(
    weights_BV: torch.Tensor, uniform_B1: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [B, 1] from the fewest tokens that have top_p of the weight of the top_k heaviest ones. Return them,
    and the weight of all those tokens [B, 1].

    Nucleus sampling: https://arxiv.org/abs/1904.09751
    """
    candidates = min(sampling.top_k or weights_BV.shape[1], weights_BV.shape[1])
    weights_BK, tokens_BK = weights_BV.topk(candidates, dim=1)
    cumulative_BK = weights_BK.cumsum(dim=1)
    before_BK = cumulative_BK - weights_BK
    kept_BK = before_BK < sampling.top_p * cumulative_BK[:, -1:]
    total_B1 = cumulative_BK.where(kept_BK, 0).amax(dim=1, keepdim=True)
    return tokens_BK.gather(1, _first_above(cumulative_BK, uniform_B1 * total_B1)), total_B1


def _first_above(cumulative_BK: torch.Tensor, level_B1: torch.Tensor) -> torch.Tensor:
    """Return the first column above the level, [B, 1], which never has weight 0. If all are NaN, return the last."""
    return torch.searchsorted(cumulative_BK, level_B1, right=True).clamp_(max=cumulative_BK.shape[1] - 1)
