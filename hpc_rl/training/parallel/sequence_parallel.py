"""Sequence parallelism: neighbouring ranks of a node compute one packed row together, each a slice of its tokens.

Linear layers, norms and the LM head compute on slices. Attention needs whole samples: the ranks of a sequence group
exchange the slices of all heads for all tokens of some heads, compute attention, and exchange back (Ulysses, Jacobs et
al. 2023, https://arxiv.org/abs/2309.14509).

What a model returns of a row is put together from the slices. Every rank of the group then computes the loss of the
whole row, and its backward pass is that of its slice: the gradients of all ranks add up to the gradient of the loss, as
they do without sequence parallelism. Losses and other sums of a row count once for the group.

Shape suffixes: T tokens of a row, S tokens of a slice, G ranks of the group, D head size, N positions with a target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import pad

from hpc_rl.errors import AgreedError, UserError
from hpc_rl.training.models.attention.packed_batch import PackedBatch
from hpc_rl.training.parallel.distributed import World


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that compute one row together, from the view of one of them. A rank alone computes whole rows."""

    ranks: tuple[int, ...] = (0,)
    """Their numbers among all ranks."""
    index: int = 0
    """Number of this rank's slice."""
    group: dist.ProcessGroup | None = None
    """Process group of these ranks; None for a rank alone."""

    @property
    def size(self) -> int:
        """The number of ranks. To torch.compile, the length of a tuple is a constant, and a number is not."""
        return len(self.ranks)

    def own(self, batch: PackedBatch) -> PackedBatch:
        """Return this rank's slice of a row. Its samples are those of the whole row, for attention.

        If the ranks do not divide the tokens, the row gets one more sample, without a target.
        """
        if self.size == 1:
            return batch
        slice_S = self._slice_of(batch)
        tokens, whole = len(batch.input_ids_T), self.size * (slice_S.stop - slice_S.start)
        targets_N = self.targets_of(batch)
        lengths, cu_seqlens = batch.lengths, batch.cu_seqlens
        if whole > tokens:
            lengths, cu_seqlens = (*lengths, whole - tokens), pad(cu_seqlens, (0, 1), value=whole)
        return PackedBatch(
            input_ids_T=_filled(batch.input_ids_T, slice_S),
            position_ids_T=_filled(batch.position_ids_T, slice_S),
            lengths=lengths,
            cu_seqlens=cu_seqlens,
            rows=batch.rows[targets_N] - slice_S.start,
            rows_N=batch.rows_N[targets_N] - slice_S.start,
            targets_N=batch.targets_N[targets_N],
            tokens=max(0, min(batch.tokens, slice_S.stop) - slice_S.start),
        )

    def targets_of(self, batch: PackedBatch) -> slice:
        """Return which of a row's targets this rank predicts: those whose position is in its slice."""
        slice_S = self._slice_of(batch)
        first, end = np.searchsorted(batch.rows, (slice_S.start, slice_S.stop)).tolist()
        return slice(first, end)

    def whole(self, own_N: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Return the results at all of a row's positions, [N, ...], from those of this rank's slice. Every rank of the
        group calls this and receives the same."""
        if self.size == 1:
            return own_N
        targets_N = self.targets_of(batch)
        missing = (targets_N.start, len(batch.rows) - targets_N.stop)
        return self.total(pad(own_N, (*[0, 0] * (own_N.ndim - 1), *missing)))

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum over the group. The gradient of each rank's summand is that of the sum, as this rank has
        computed it."""
        if self.size == 1:
            return own
        result: torch.Tensor = _Sum.apply(own, self.group)
        return result

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all tokens of this rank's heads, from all heads of its tokens, in one exchange.

        Key heads are repeated if the ranks do not divide their number.

        Args:
            query: [1, query heads, S, D].
            key, value: [1, key heads, S, D].

        Returns:
            [1, query heads / G, T, D], and keys and values alike.

        Raises:
            UserError: the group does not divide the query heads.
        """
        if query.shape[1] % self.size:
            raise UserError(
                f"trainer.sequence_parallel={self.size} does not divide the {query.shape[1]} query heads of a layer: "
                "use a divisor of their number"
            )
        times = repetitions(key.shape[1], self.size)
        if times > 1:
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        # A view [G, S, heads of that rank * D] of each: the copy is the concatenation.
        sent = [x[0].unflatten(0, (self.size, -1)).transpose(1, 2).flatten(2) for x in (query, key, value)]
        received_T = self._exchange(torch.cat(sent, dim=2)).flatten(0, 1)
        parts = received_T.split([x.shape[2] for x in sent], dim=1)
        sizes = (x.shape[-1] for x in (query, key, value))
        q, k, v = (x.unflatten(1, (-1, size)).transpose(0, 1)[None] for x, size in zip(parts, sizes, strict=True))
        return q, k, v

    def to_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        """Return all heads of this rank's tokens, [1, S, query heads, D], from all tokens of its heads.

        Args:
            attended: [1, T, query heads / G, D].
        """
        received_GS = self._exchange(attended[0].flatten(1).unflatten(0, (self.size, -1)))
        return received_GS.transpose(0, 1).unflatten(2, (-1, attended.shape[3])).flatten(1, 2)[None]

    def _exchange(self, x_G: torch.Tensor) -> torch.Tensor:
        """Send row r to rank r, and return what each rank has sent."""
        result: torch.Tensor = _Exchange.apply(x_G, self.group)
        return result

    def _slice_of(self, batch: PackedBatch) -> slice:
        """Return the positions of this rank's slice in the row, which may be past its end."""
        size = -(-len(batch.input_ids_T) // self.size)
        return slice(self.index * size, (self.index + 1) * size)


ALONE = SequenceGroup()


def join(world: World, size: int) -> SequenceGroup:
    """Return this rank's sequence group. All models of a process share it, and with it the communicator. Every rank
    calls this.

    Args:
        size: trainer.sequence_parallel.

    Raises:
        AgreedError: the ranks of a node cannot be divided into such groups.
    """
    if size == 1:
        return ALONE
    on_node = world.ranks_per_node or world.size
    if world.size % size or on_node % size:
        raise AgreedError(
            f"trainer.sequence_parallel={size} needs a multiple of {size} ranks on each node, and a node has {on_node} "
            f"of {world.size} ranks: use a divisor of the ranks of a node, or start another number of ranks"
        )
    return _joined(world, size, dist.group.WORLD)


@cache
def _joined(world: World, size: int, _group: dist.ProcessGroup | None) -> SequenceGroup:
    first = world.rank - world.rank % size
    ranks = range(first, first + size)
    part = world.part(ranks, ranks_per_node=size)
    return SequenceGroup(tuple(ranks), part.rank, part.group)


def repetitions(key_heads: int, size: int) -> int:
    """Return how often each key head is repeated, so that every rank gets the same number of them."""
    times = 1
    while key_heads * times % size:  # torch.compile can trace this, and no function of math
        times += 1
    return times


def _filled(values_T: torch.Tensor, slice_S: slice) -> torch.Tensor:
    """Return a slice of a row, with zeros past the end of the row."""
    found = values_T[slice_S]
    return pad(found, (0, slice_S.stop - slice_S.start - len(found)))


class _Exchange(torch.autograd.Function):
    """An all-to-all of equal parts. What comes back in the backward pass is the gradient of what was sent."""

    @staticmethod
    def forward(ctx: Any, x_G: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x_G, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """A sum over ranks that all compute the same from it: each one's own gradient is already the whole one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _all_to_all(x_G: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = x_G.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
