"""Attention whose weights are more than the softmax of scaled products, by matrix products and a softmax in float32.

- Soft-capping: scores s become c tanh(s / c), with the cap c (Gemma 2, https://arxiv.org/abs/2408.00118, section 2).
- Sinks: each head has a learned score that takes part in the softmax and has no value, so that the weights of a token
  add up to less than 1 (gpt-oss, https://arxiv.org/abs/2508.10925, section 2.3).
- Dropout of weights, and values whose size is not that of the keys.

torch's kernels for packed rows compute none of them. flex_attention computes the first two, but has no backward pass
on CPUs, so that its gradients could not be tested there. Blocks of queries bound the memory, and each is computed again
in the backward pass. `attend` is one operator: torch.compile, which would trace a loop over samples again for each
number of samples, does not look into it. Shape suffixes: T tokens of a row, B queries of a block, L keys that they
attend to, J key heads, G query heads per key head, R = G B rows of a block, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

SCORE_BYTES = {"cpu": 64 << 20, "gpu": 256 << 20}
"""Bytes of the float32 scores of one block."""


@dataclass(frozen=True)
class SoftmaxOptions:
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
        scores = capped(scores, self.softcap).masked_fill(hidden, -torch.inf)
        return shares(scores, sinks)[..., : scores.shape[-1]]


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return scores between -softcap and softcap."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def shares(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of scores [..., L] and, in one more column, that of the sinks."""
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(dim=-1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    softmax: SoftmaxOptions,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute causal attention in each sample of a row.

    Args:
        query: [1, query heads, T, D].
        key, value: [1, key heads, T, D]; query heads are a multiple of key heads.
        borders: the start of each sample, and the end of the row: integers in host memory, [samples + 1].
        dropout: probability with which a weight becomes 0.

    Returns:
        [1, T, query heads, D].
    """
    scale = query.shape[-1] ** -0.5 if softmax.scaling is None else softmax.scaling
    # The backward pass drops the same weights, from the same seed.
    seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu") if dropout else None
    options = (scale, softmax.window, softmax.softcap, dropout)
    out: torch.Tensor = _attend(query, key, value, borders, softmax.sinks_H, seed, *options)
    return out


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor borders, Tensor? sinks, Tensor? seed, float scale, int? window, "
    "float? softcap, float dropout"
)


@torch.library.custom_op("hpc_rl::exact_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> torch.Tensor:
    softmax = _Softmax(sinks, scale, window, softcap)
    drawn = _Drawn(dropout, seed, query.device)
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    query_JGTD, out_JGTD = (x.unflatten(0, (key.shape[1], -1)) for x in (query[0], out[0].transpose(0, 1)))
    for queries, keys in blocks(borders.tolist(), query.shape[1], window, query.device):
        _, shares_JGBL = softmax(query_JGTD[:, :, queries], key[0, :, keys], queries.start - keys.start)
        (weights_JGBL,) = drawn(shares_JGBL[..., : keys.stop - keys.start])
        result_JRD = weights_JGBL.flatten(1, 2).to(value.dtype) @ value[0, :, keys]
        out_JGTD[:, :, queries] = result_JRD.view(*weights_JGBL.shape[:3], -1)
    return out


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op(
    "hpc_rl::exact_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    sinks: torch.Tensor | None,
    seed: torch.Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key, value and sinks; the last one is empty without sinks.

    With shares P of the softmax, weights W after dropout, and scores S: dW = dO V', dV = W' dO, dP = dropped(dW), and
    dS = P (dP - sum(dP P)), which the cap multiplies by 1 - (S / c)^2. A sink has no value, so that its dP is 0.
    """
    softmax = _Softmax(sinks, scale, window, softcap)
    drawn = _Drawn(dropout, seed, query.device)
    exact = _exact(query)
    grad_q = torch.empty_like(query)
    # Several blocks add to a key.
    grad_k, grad_v = (torch.zeros(x.shape, dtype=exact, device=x.device) for x in (key, value))
    grad_sinks = torch.zeros(0 if sinks is None else len(sinks), dtype=exact, device=query.device)
    rows = (grad[0].transpose(0, 1), query[0], grad_q[0])
    grad_JGTD, query_JGTD, grad_q_JGTD = (x.unflatten(0, (key.shape[1], -1)) for x in rows)
    for queries, keys in blocks(borders.tolist(), query.shape[1], window, query.device):
        q_JGBD, grad_JRD = query_JGTD[:, :, queries], grad_JGTD[:, :, queries].flatten(1, 2)
        scores_JGBL, shares_JGBL = softmax(q_JGBD, key[0, :, keys], queries.start - keys.start)
        P_JGBL = shares_JGBL[..., : keys.stop - keys.start]
        grad_P_JGBL = (grad_JRD @ value[0, :, keys].transpose(1, 2)).to(exact).view_as(P_JGBL)
        weights_JGBL, grad_P_JGBL = drawn(P_JGBL, grad_P_JGBL)
        grad_v[0, :, keys] += weights_JGBL.to(value.dtype).flatten(1, 2).transpose(1, 2) @ grad_JRD
        sum_JGB1 = (grad_P_JGBL * P_JGBL).sum(dim=3, keepdim=True)
        if sinks is not None:
            grad_sinks -= (shares_JGBL[..., -1:] * sum_JGB1).sum(dim=(2, 3)).flatten()
        grad_S_JGBL = grad_P_JGBL.sub_(sum_JGB1).mul_(P_JGBL)
        if softcap is not None:
            grad_S_JGBL *= 1 - (scores_JGBL / softcap).square()
        grad_S_JRL = grad_S_JGBL.mul_(scale).to(query.dtype).flatten(1, 2)
        grad_q_JGTD[:, :, queries] = (grad_S_JRL @ key[0, :, keys]).view_as(q_JGBD)
        grad_k[0, :, keys] += grad_S_JRL.transpose(1, 2) @ q_JGBD.flatten(1, 2)
    return (
        grad_q,
        grad_k.to(key.dtype),
        grad_v.to(value.dtype),
        grad_sinks.to((query if sinks is None else sinks).dtype),
    )


@_gradients.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    sinks: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    like_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape), like_sinks


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    kept = ctx.saved_tensors  # which a checkpoint provides once
    grad_q, grad_k, grad_v, grad_sinks = _gradients(grad, *kept, *ctx.options)
    return grad_q, grad_k, grad_v, None, None if kept[4] is None else grad_sinks, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_keep)


def blocks(borders: list[int], heads: int, window: int | None, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block, and the keys that they attend to, as parts of the row.

    Args:
        borders: the start of each sample, and the end of the row.
        heads: query heads.
    """
    most = SCORE_BYTES["cpu" if device.type == "cpu" else "gpu"] // (4 * heads)  # scores of each head in a block
    for start, end in pairwise(borders):
        step = max(1, most // (end - start))
        if window is not None:  # a block of `step` queries has at most step + window keys
            step = max(step, int(math.sqrt(window**2 / 4 + most) - window / 2))
        for first in range(start, end, step):
            last = min(first + step, end)
            yield slice(first, last), slice(start if window is None else max(start, first - window + 1), last)


@dataclass(frozen=True)
class _Softmax:
    """What scores and shares of a block depend on, besides its queries and keys."""

    sinks_H: torch.Tensor | None
    scale: float
    window: int | None
    softcap: float | None

    def __call__(self, q_JGBD: torch.Tensor, k_JLD: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [J, G, B, L], and their softmax, with one more column if there are sinks.

        Args:
            offset: number of the key that has the position of the first query.
        """
        products_JRL = (q_JGBD.flatten(1, 2) @ k_JLD.transpose(1, 2)).to(_exact(q_JGBD)).mul_(self.scale)
        scores_JGBL = capped(products_JRL.view(*q_JGBD.shape[:3], -1), self.softcap)
        queries_B = torch.arange(offset, offset + q_JGBD.shape[2], device=k_JLD.device)
        back_BL = queries_B[:, None] - torch.arange(k_JLD.shape[1], device=k_JLD.device)
        hidden_BL = back_BL < 0
        if self.window is not None:
            hidden_BL |= back_BL >= self.window
        sinks = None if self.sinks_H is None else self.sinks_H.view(*q_JGBD.shape[:2], 1, 1)
        return scores_JGBL, shares(scores_JGBL.masked_fill(hidden_BL, -torch.inf), sinks)


class _Drawn:
    """Decides which weights become 0; the same seed decides the same for each block again."""

    def __init__(self, dropout: float, seed: torch.Tensor | None, device: torch.device) -> None:
        self.dropout = dropout
        self.generator = None if seed is None else torch.Generator(device).manual_seed(int(seed))

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tensors of one shape, in which the same elements are 0, and the others are larger accordingly."""
        if self.generator is None:
            return tensors
        drawn = torch.rand(tensors[0].shape, generator=self.generator, device=self.generator.device)
        factors = (drawn >= self.dropout) / (1 - self.dropout)
        return tuple(x * factors for x in tensors)


def _exact(x: torch.Tensor) -> torch.dtype:
    """Return the type of scores: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)
