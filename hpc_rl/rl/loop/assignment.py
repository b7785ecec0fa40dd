"""Which rank holds which responses, and in which order: pure functions of lengths.

A step's responses are cut into mini-batches, in their order or in a shuffled one, and each mini-batch is divided among
all ranks by tokens (training/batching.py). The mini-batches, and so the updates, are the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpc_rl.training.batching import Bin, plan_batch

T = TypeVar("T")
_SHUFFLE = 1
"""Distinguishes these random numbers from those of the same seed and step that sampling uses."""


@dataclass(frozen=True)
class Shard:
    """One rank's responses, as numpy arrays, which Ray's object store passes on without a copy."""

    tokens: NDArray[np.int32]
    """Prompt and response of all samples, concatenated."""
    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    mini_batches: list[list[int]]
    """Number of samples in each micro-batch of each mini-batch, in the order of the samples. 0 means that the rank only
    takes part in collectives."""
    response_mask: NDArray[np.bool_] | None = None
    """Whether the policy sampled the token: of all responses, concatenated. None: it sampled all."""


@dataclass(frozen=True)
class ShardParcel:
    """One rank's responses in its order, which share the memory of the step's columns. The rank puts them together, so
    that the driver copies nothing."""

    mini_batches: list[list[int]]
    """As those of the shard."""
    prompt_ids: Sequence[NDArray[np.int32]]
    response_ids: Sequence[NDArray[np.int32]]
    response_masks: Sequence[NDArray[np.bool_]] | None = None

    def open(self) -> Shard:
        """Put them together."""
        empty, no_masks = np.zeros(0, np.int32), np.zeros(0, np.bool_)
        pairs = zip(self.prompt_ids, self.response_ids, strict=True)
        masks = self.response_masks
        return Shard(
            tokens=np.concatenate([empty, *(ids for pair in pairs for ids in pair)]),
            prompt_lengths=np.array([len(ids) for ids in self.prompt_ids], np.int64),
            response_lengths=np.array([len(ids) for ids in self.response_ids], np.int64),
            mini_batches=self.mini_batches,
            response_mask=None if masks is None else np.concatenate([no_masks, *masks]),
        )


@dataclass(frozen=True)
class Assignment:
    """A step's responses on the ranks."""

    micro_batches: list[list[list[Bin]]]
    """`micro_batches[rank][mini_batch][micro_batch]` is a list of responses."""
    orders: list[NDArray[np.int64]]
    """The responses of each rank, in the order in which it holds them."""
    token_slices: list[list[slice]]
    """Where each response of each rank is in a flat column of the whole step, in the order of `orders`."""
    sequence_parallel: int = 1
    """Number of neighbouring ranks that have the same responses, and compute each row together."""

    @property
    def sizes(self) -> list[list[list[int]]]:
        """Each rank's Shard.mini_batches."""
        return [[[len(micro) for micro in mini] for mini in minis] for minis in self.micro_batches]

    @property
    def responses(self) -> int:
        """Number of responses of the step."""
        return sum(map(len, self.once(self.orders)))

    def longest_row(self, lengths: NDArray[np.int64]) -> int:
        """Return the tokens of the longest row, from those of each response, [B]."""
        rows = (micro for minis in self.once(self.micro_batches) for mini in minis for micro in mini)
        return max((int(lengths[micro].sum()) for micro in rows if micro), default=0)

    def once(self, by_rank: Sequence[T]) -> Sequence[T]:
        """Return one of the equal items that the ranks of each sequence group have."""
        return by_rank[:: self.sequence_parallel]

    def split(self, column_N: NDArray[np.float32]) -> list[list[NDArray[np.float32]]]:
        """Return each rank's part of a flat token column: that of each of its responses, without a copy."""
        return [[column_N[place] for place in own] for own in self.token_slices]

    def join(self, parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return a flat token column from each rank's part: what `split` returns for it, concatenated."""
        joined = np.empty(sum(map(len, self.once(parts))), np.float32)
        for own, part in zip(self.once(self.token_slices), self.once(parts), strict=True):
            end = 0
            for place in own:
                start, end = end, end + place.stop - place.start
                joined[place] = part[start:end]
        return joined

    def join_responses(self, parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return one number per response, [B], from those of each rank."""
        joined = np.empty(self.responses, np.float32)
        for order, part in zip(self.once(self.orders), self.once(parts), strict=True):
            joined[order] = part
        return joined


def mini_batches(responses: int, mini_batch_size: int | None) -> list[slice]:
    """Return the responses of each mini-batch; the last one may be smaller."""
    size = mini_batch_size or responses
    return [slice(start, min(start + size, responses)) for start in range(0, responses, size)]


def shuffled(responses: int, seed: int, step: int, epoch: int) -> NDArray[np.int64]:
    """Return the order of the responses, [B], that one pass over a step cuts into mini-batches."""
    return np.random.default_rng([seed, step, epoch, _SHUFFLE]).permutation(responses)


def assign_responses(
    lengths: NDArray[np.int64],
    sampled: NDArray[np.int64],
    mini_batch_size: int | None,
    ranks: int,
    row_tokens: int,
    order: NDArray[np.int64] | None = None,
    sequence_parallel: int = 1,
    packing: bool = True,
) -> Assignment:
    """Assign a step's responses to ranks.

    Args:
        lengths: tokens of prompt and response, [B].
        sampled: tokens of the response that the policy sampled, [B]: the lengths of token columns.
        row_tokens: maximum number of tokens, including prompts, of one micro-batch.
        order: order of the responses, [B]. Default: as they are.
        sequence_parallel: number of ranks that get the same responses.
        packing: whether a micro-batch may have several samples.
    """
    assigned: list[list[list[Bin]]] = [[] for _ in range(ranks // sequence_parallel)]
    ordered = np.arange(len(lengths)) if order is None else order
    for part in mini_batches(len(lengths), mini_batch_size):
        responses = ordered[part].tolist()
        for group, micros in enumerate(plan_batch(lengths[responses].tolist(), len(assigned), row_tokens, packing)):
            assigned[group].append([[responses[sample] for sample in micro] for micro in micros])
    bounds = [0, *np.cumsum(sampled).tolist()]
    orders = [np.array([i for mini in minis for micro in mini for i in micro], np.int64) for minis in assigned]
    slices = [[slice(bounds[i], bounds[i + 1]) for i in order.tolist()] for order in orders]
    copies = sequence_parallel
    return Assignment(_repeated(assigned, copies), _repeated(orders, copies), _repeated(slices, copies), copies)


def shard_parcels(
    assignment: Assignment,
    prompt_ids: Sequence[NDArray[np.int32]],
    response_ids: Sequence[NDArray[np.int32]],
    response_masks: Sequence[NDArray[np.bool_]] | None = None,
) -> list[ShardParcel]:
    """Return what each rank receives, once per step.

    Args:
        response_masks: see Shard.response_mask, for each response.
    """
    found = [
        ShardParcel(
            sizes,
            [prompt_ids[i] for i in order],
            [response_ids[i] for i in order],
            None if response_masks is None else [response_masks[i] for i in order],
        )
        for order, sizes in zip(assignment.once(assignment.orders), assignment.once(assignment.sizes), strict=True)
    ]
    return _repeated(found, assignment.sequence_parallel)


def _repeated(by_group: list[T], copies: int) -> list[T]:
    """Return what each rank has, from what each sequence group has."""
    return [one for one in by_group for _ in range(copies)]
