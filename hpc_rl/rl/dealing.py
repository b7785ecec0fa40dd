"""Which rank holds which responses, in which order: pure functions on lengths.

A step's responses are cut into mini-batches in the order in which they stand; each mini-batch is dealt to all ranks by
tokens (engine/batching.py). The mini-batches, and thus the updates, are the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_rl.training.batching import Bin, plan_batch


@dataclass(frozen=True)
class Shard:
    """One rank's responses; numpy arrays, which Ray's object store hands over without a copy."""

    tokens: NDArray[np.int32]
    """Prompt and response of every sample, end to end."""
    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    mini_batches: list[list[int]]
    """Samples in each micro-batch of each mini-batch; samples stand in this order. 0: nothing to do for this rank."""


@dataclass(frozen=True)
class Layout:
    """A step's responses on the ranks."""

    plans: list[list[list[Bin]]]
    """`plans[rank][mini_batch][micro_batch]` holds responses."""
    orders: list[NDArray[np.int64]]
    """Responses of each rank, in the order in which it holds them."""
    token_rows: list[NDArray[np.int64]]
    """Where the tokens of a rank's responses are in a flat column of the whole step."""

    def split(self, column_N: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """A flat token column as each rank holds it."""
        return [column_N[rows] for rows in self.token_rows]

    def join(self, parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """What `split` takes apart."""
        joined = np.empty(sum(map(len, parts)), np.float32)
        for rows, part in zip(self.token_rows, parts, strict=True):
            joined[rows] = part
        return joined

    def join_rows(self, parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """One number per response, from each rank's."""
        joined = np.empty(sum(map(len, parts)), np.float32)
        for order, part in zip(self.orders, parts, strict=True):
            joined[order] = part
        return joined


def mini_batches(responses: int, mini_batch_size: int | None) -> list[slice]:
    """The responses of each mini-batch; the last one may be smaller."""
    size = mini_batch_size or responses
    return [slice(start, min(start + size, responses)) for start in range(0, responses, size)]


def plan_step(
    prompt_lengths: NDArray[np.int64],
    response_lengths: NDArray[np.int64],
    mini_batch_size: int | None,
    ranks: int,
    micro_tokens: int,
) -> Layout:
    """Deal a step's responses to ranks.

    Args:
        prompt_lengths, response_lengths: tokens, [B].
        micro_tokens: most tokens, prompts included, of one micro-batch.
    """
    totals = prompt_lengths + response_lengths
    plans: list[list[list[Bin]]] = [[] for _ in range(ranks)]
    for part in mini_batches(len(totals), mini_batch_size):
        for rank, micros in enumerate(plan_batch(totals[part].tolist(), ranks, micro_tokens)):
            plans[rank].append([[sample + part.start for sample in micro] for micro in micros])
    starts = np.concatenate([[0], np.cumsum(response_lengths)])
    orders = [np.array([i for mini in plan for micro in mini for i in micro], np.int64) for plan in plans]
    return Layout(plans, orders, [_ranges(starts[order], response_lengths[order]) for order in orders])


def shards(
    layout: Layout, prompt_ids: Sequence[NDArray[np.int32]], response_ids: Sequence[NDArray[np.int32]]
) -> list[Shard]:
    """What each rank is sent, once per step."""
    empty = np.zeros(0, np.int32)
    return [
        Shard(
            tokens=np.concatenate([empty, *(ids for i in order for ids in (prompt_ids[i], response_ids[i]))]),
            prompt_lengths=np.array([len(prompt_ids[i]) for i in order], np.int64),
            response_lengths=np.array([len(response_ids[i]) for i in order], np.int64),
            mini_batches=[[len(micro) for micro in mini] for mini in plan],
        )
        for order, plan in zip(layout.orders, layout.plans, strict=True)
    ]


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ..., start + length - 1 of each pair, end to end."""
    if not len(lengths):
        return np.zeros(0, np.int64)
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
