"""Attention whose weights are more than the softmax of scaled products, by matrix products and a softmax in float32.

- Soft-capping: scores s become c tanh(s / c), with the cap c (Gemma 2, https://arxiv.org/abs/2408.00118, section 2).
- Sinks: each head has a learned score that takes part in the softmax and has no value, so that the weights of a token
  add up to less than 1 (gpt-oss, https://arxiv.org/abs/2508.10925, section 2.3).

torch's kernels for packed rows compute neither. flex_attention computes both, but has no backward pass on CPUs, so that
its gradients could not be tested there. Blocks of queries bound the memory, and each is computed again in the backward
pass. Shape suffixes: S tokens of a sample, B queries of a block, L keys that they attend to, J key heads, G query heads
per key head, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import dropout as drop
from torch.utils.checkpoint import checkpoint

SCORE_BYTES = {"cpu": 64 << 20, "gpu": 256 << 20}
"""Bytes of the float32 scores of one block."""


@dataclass(frozen=True)
class Scoring:
    """How the products of queries and keys become the weights of values."""

    scaling: float | None = None
    """Factor of the products; None for head_size ** -0.5."""
    window: int | None = None
    """Number of tokens that a token attends to, counting back from itself; None for all."""
    softcap: float | None = None
    """Cap of the scores."""
    sinks_H: torch.Tensor | None = None
    """Score of each query head's sink."""

    @property
    def needs_scores(self) -> bool:
        """Whether kernels that do not return their scores cannot compute the weights."""
        return self.softcap is not None or self.sinks_H is not None

    def weights(self, scores: torch.Tensor, hidden: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Return the weights of the values, float32.

        Args:
            scores: scaled products, float32 [..., L].
            hidden: bool, of a shape that broadcasts: whether a key is not attended to.
            sinks: scores of sinks, of a shape that broadcasts to [..., 1].
        """
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is None:
            return scores.softmax(dim=-1)
        sinks = sinks.float().expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    scoring: Scoring,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute causal attention in each sample of a row.

    Args:
        query: [1, query heads, T, head size].
        key, value: [1, key heads, T, head size]; query heads are a multiple of key heads.
        lengths: tokens of each sample.
        dropout: probability with which a weight becomes 0.

    Returns:
        [1, T, query heads, head size].
    """
    grouped = query[0].unflatten(0, (key.shape[1], -1))
    samples = (grouped.split(lengths, dim=2), key[0].split(lengths, dim=1), value[0].split(lengths, dim=1))
    blocks = [block for sample in zip(*samples, strict=True) for block in _sample(*sample, scoring, dropout)]
    return torch.cat(blocks, dim=2).flatten(0, 1).transpose(0, 1)[None]


def _sample(
    q_JGSD: torch.Tensor, k_JSD: torch.Tensor, v_JSD: torch.Tensor, scoring: Scoring, dropout: float
) -> list[torch.Tensor]:
    """Return the results of a sample's blocks, [J, G, B, D] each."""
    heads, groups, length, _ = q_JGSD.shape
    limit = SCORE_BYTES["cpu" if q_JGSD.device.type == "cpu" else "gpu"]
    most = limit // (4 * heads * groups)  # scores of each head in a block
    step = max(1, most // length)
    if scoring.window is not None:  # a block of `step` queries has at most step + window keys
        step = max(step, int(math.sqrt(scoring.window**2 / 4 + most) - scoring.window / 2))
    sinks = None if scoring.sinks_H is None else scoring.sinks_H.view(heads, groups, 1, 1)
    found = []
    for first in range(0, length, step):
        end = min(first + step, length)
        start = 0 if scoring.window is None else max(0, first - scoring.window + 1)
        tensors = (q_JGSD[:, :, first:end], k_JSD[:, start:end], v_JSD[:, start:end], sinks)
        inputs = (*tensors, scoring, first - start, dropout)
        if torch.is_grad_enabled():
            found.append(checkpoint(_block, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            found.append(_block(*inputs))
    return found


def _block(
    q_JGBD: torch.Tensor,
    k_JLD: torch.Tensor,
    v_JLD: torch.Tensor,
    sinks: torch.Tensor | None,
    scoring: Scoring,
    offset: int,
    dropout: float,
) -> torch.Tensor:
    """Compute a block, whose first query has the position of key number `offset`."""
    scale = q_JGBD.shape[-1] ** -0.5 if scoring.scaling is None else scoring.scaling
    scores_JGBL = (q_JGBD @ k_JLD[:, None].transpose(-1, -2)).float() * scale
    queries = torch.arange(offset, offset + q_JGBD.shape[2], device=q_JGBD.device)
    back_BL = queries[:, None] - torch.arange(k_JLD.shape[1], device=q_JGBD.device)
    hidden_BL = back_BL < 0
    if scoring.window is not None:
        hidden_BL |= back_BL >= scoring.window
    weights_JGBL = scoring.weights(scores_JGBL, hidden_BL, sinks)
    if dropout:
        weights_JGBL = drop(weights_JGBL, dropout)
    return weights_JGBL.to(v_JLD.dtype) @ v_JLD[:, None]
