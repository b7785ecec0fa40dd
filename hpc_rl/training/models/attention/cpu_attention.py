"""Causal attention inside each sample of a packed row on CPUs: torch's fused kernel for one sample, in one operator.

torch.compile would trace a loop over samples again for each number of samples. It does not look into an operator.

https://docs.pytorch.org/docs/stable/library.html
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor borders, float? scale, int? window"


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Compute attention.

    Args:
        query: [1, query heads, T, head size].
        key, value: [1, key heads, T, head size]; query heads are a multiple of key heads.
        borders: the start of each sample, and the end of the row: integers, [samples + 1].
        scale: factor of the scores; None for head_size ** -0.5.
        window: the number of tokens that a token attends to, counting back from itself; None for all.

    Returns:
        [1, T, query heads, head size].
    """
    out: torch.Tensor = _attend(query, key, value, borders, scale, window)[0]
    return out


@torch.library.custom_op("hpc_rl::cpu_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and the logarithms of the softmax's sums [1, T, query heads] for the backward pass."""
    out, sums = _empty(query)
    rows = (query, key, value, out.transpose(1, 2), sums.transpose(1, 2))
    for q, k, v, result, sum_ in _samples(borders, *rows):
        mask = mask_of(q, window)
        result[:], sum_[:] = _kernel(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
    return out, sums


@_attend.register_fake
def _(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(query)


@torch.library.custom_op(
    "hpc_rl::cpu_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor sums, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _gradients(
    grad: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value."""
    found = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    rows = (query, key, value, *(x.transpose(1, 2) for x in (out, sums, grad.contiguous())))
    for (q, k, v, result, sum_, grad_result), parts in zip(
        _samples(borders, *rows), _samples(borders, *found), strict=True
    ):
        mask = mask_of(q, window)
        gradients = _backward_kernel(grad_result, q, k, v, result, sum_, 0.0, mask is None, attn_mask=mask, scale=scale)
        for part, gradient in zip(parts, gradients, strict=True):
            part[:] = gradient
    return found


@_gradients.register_fake
def _(
    grad: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: torch.Tensor, _sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*_gradients(grad, *ctx.saved_tensors, *ctx.options), None, None, None)


_attend.register_autograd(_backward, setup_context=_keep)


def _empty(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the result and the sums; tokens before heads, as the kernel and transformers have them."""
    _, heads, tokens, size = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(1, tokens, heads, size), query.new_empty(1, tokens, heads, dtype=exact)


def _samples(borders: torch.Tensor, *rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the parts of rows [1, heads, T, ...] that belong to a sample."""
    for start, end in pairwise(borders.tolist()):
        yield tuple(x[:, :, start:end] for x in rows)


def mask_of(query: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return what is added to the scores of a sample that is longer than the window, [length, length]: 0, or minus
    infinity for tokens that are later or too far back. Return None if the window hides nothing."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=query.device)
    back = position[:, None] - position
    return torch.zeros_like(back, dtype=query.dtype).masked_fill_((back < 0) | (back >= window), -torch.inf)
