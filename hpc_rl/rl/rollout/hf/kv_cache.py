"""Keys and values of the sequences that are being generated, and attention that reads and writes them.

A sequence occupies one row, with its first token in column 0, regardless of the lengths of other sequences. The two
classes that fill the cache are passed to the model's forward as `attend`, so that models run unchanged and
transformers' own caches are not involved.

Shape suffixes: B rows in use, L columns in use, G query heads per key head, D head size, T tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from hpc_rl.training.models.attention.exact_attention import SoftmaxOptions
from hpc_rl.training.models.attention.packed_attention import SampleBounds, packed_attention


class KVCache:
    """Hold `rows` sequences of at most `columns` tokens. A layer's memory is allocated when it is first used."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows = rows
        self.columns = columns
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of one layer, [rows, key heads, columns, head size].

        They start as zeros: masked entries have to be finite, because 0 times NaN is NaN.

        Args:
            index: the layer's index.
            key: new states [1, key heads, T, head size], from which shape and type are taken.
            value: the same for values.
        """
        if index not in self._layers:
            shapes = ((self.rows, x.shape[1], self.columns, x.shape[3]) for x in (key, value))
            keys, values = (key.new_zeros(shape) for shape in shapes)
            self._layers[index] = (keys, values)
        return self._layers[index]

    def grow(self, rows: int, columns: int) -> None:
        """Make room for more rows and columns, and keep what is in the cache."""
        self.rows, self.columns = rows, columns
        for index, (keys, values) in self._layers.items():
            shapes = ((rows, x.shape[1], columns, x.shape[3]) for x in (keys, values))
            self._layers[index] = (grown(keys, next(shapes)), grown(values, next(shapes)))

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], columns: int) -> None:
        """Copy the first `columns` tokens of some rows to others; no row is in both."""
        tensors = [states for layer in self._layers.values() for states in layer]
        if not tensors:
            return
        source, target = torch.tensor([sources, targets], device=tensors[0].device)
        for states in tensors:
            used = states[:, :, :columns]
            used[target] = used[source]


def grown(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a larger tensor that begins with this one in each dimension; the rest is zero."""
    larger = tensor.new_zeros(shape)
    larger[tuple(map(slice, tensor.shape))] = tensor
    return larger


class PrefillDone(Exception):
    """Signal that the last layer's keys and values are in the cache; its output is not needed."""


class Prefill:
    """Attention for one packed row of prompts, each to itself; their keys and values go to the cache."""

    def __init__(
        self, cache: KVCache, rows: Sequence[int], lengths: Sequence[int], last_layer: int, device: torch.device
    ) -> None:
        """
        Args:
            rows: row of the cache for each prompt.
            lengths: tokens of each prompt.
            last_layer: index of the last layer, which raises PrefillDone.
        """
        self.cache = cache
        self.last_layer = last_layer
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
        self.bounds = SampleBounds(tuple(lengths), cu_seqlens)
        self.positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self.rows_T = torch.tensor(rows).repeat_interleave(torch.tensor(lengths)).to(device)

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax: SoftmaxOptions,
    ) -> torch.Tensor:
        index = module.layer_idx
        for states, new in zip(self.cache.layer(index, key, value), (key, value), strict=True):
            states[self.rows_T, :, self.positions_T] = new[0].transpose(0, 1)
        if index == self.last_layer:
            raise PrefillDone
        output, _ = packed_attention(
            module,
            query,
            key,
            value,
            None,
            packed_bounds=self.bounds,
            scaling=softmax.scaling,
            sliding_window=softmax.window,
            softcap=softmax.softcap,
            s_aux=softmax.sinks_H,
        )
        return output


class Decode:
    """Attention for one new token in each of the first B rows: the token is added to its row, then attends to it."""

    def __init__(self, cache: KVCache, positions_B: torch.Tensor, longest: int) -> None:
        """
        Args:
            positions_B: number of tokens in each row, which is the position of the new one.
            longest: the largest of them; columns after it are not touched.
        """
        self.cache = cache
        self.positions_B = positions_B
        self.batch = positions_B.shape[0]
        self.columns = longest + 1
        self.back_BL = positions_B[:, None] - torch.arange(self.columns, device=positions_B.device)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._targets: dict[int, torch.Tensor] = {}

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax: SoftmaxOptions,
    ) -> torch.Tensor:
        heads = key.shape[1]
        scale = query.shape[3] ** -0.5 if softmax.scaling is None else softmax.scaling
        targets = self._targets_of(heads)
        rows = []
        for states, new in zip(self.cache.layer(module.layer_idx, key, value), (key, value), strict=True):
            size = new.shape[3]
            states.view(-1, size).index_copy_(0, targets, new[0].transpose(0, 1).reshape(-1, size))
            rows.append(states[: self.batch, :, : self.columns])
        keys, values = rows
        # Query heads that share a key head are adjacent, and form the rows of one small matrix product.
        query_BGD = query[0].transpose(0, 1).reshape(self.batch * heads, -1, query.shape[3])
        mask = self._mask_of(heads, softmax.window, query.dtype)
        if softmax.needs_scores:
            output = _scored(query_BGD, keys.flatten(0, 1), values.flatten(0, 1), mask, scale, softmax)
        elif query.dtype == torch.float32:
            scores = torch.baddbmm(mask, query_BGD, keys.flatten(0, 1).transpose(1, 2), alpha=scale)
            output = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
        else:  # does not round scores to 16 bits before the softmax
            output = scaled_dot_product_attention(
                query_BGD.unflatten(0, (self.batch, heads)),
                keys,
                values,
                attn_mask=mask.unflatten(0, (self.batch, heads)),
                scale=scale,
            )
        return output.reshape(1, self.batch, query.shape[1], -1)

    def _targets_of(self, heads: int) -> torch.Tensor:
        """Return the indices [B * heads] of the new tokens in the flattened dimensions rows, heads and columns."""
        if heads not in self._targets:
            starts = torch.arange(self.batch * heads, device=self.positions_B.device) * self.cache.columns
            self._targets[heads] = (starts.view(-1, heads) + self.positions_B[:, None]).view(-1)
        return self._targets[heads]

    def _mask_of(self, heads: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask [B * heads, 1, L]: 0 for tokens that the new one attends to, otherwise minus infinity."""
        if (heads, window) not in self._masks:
            hidden_BL = self.back_BL < 0
            if window is not None:
                hidden_BL |= self.back_BL >= window
            mask_BL = torch.zeros_like(hidden_BL, dtype=dtype).masked_fill_(hidden_BL, -torch.inf)
            self._masks[heads, window] = mask_BL.repeat_interleave(heads, dim=0)[:, None]
        return self._masks[heads, window]


def _scored(
    query_BGD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softmax: SoftmaxOptions,
) -> torch.Tensor:
    """Attend with soft-capped scores or sinks.

    Args:
        query_BGD: as in Decode, with B rows times key heads: [B * heads, G, D].
        keys, values: [B * heads, L, D].
        mask: [B * heads, 1, L].
    """
    scores = torch.bmm(query_BGD, keys.transpose(1, 2)).float() * scale
    sinks = None
    if softmax.sinks_H is not None:
        groups = query_BGD.shape[1]
        sinks = softmax.sinks_H.view(-1, groups, 1).repeat(len(query_BGD) * groups // len(softmax.sinks_H), 1, 1)
    return torch.bmm(softmax.weights(scores, mask < 0, sinks).to(values.dtype), values)
