"""A rank's part of a step as packed micro-batches, which all models and updates of the step use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.loop.assignment import Shard
from hpc_rl.training.models.attention.packed_batch import PackedBatch, filler, pack_samples


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass."""

    batch: PackedBatch
    """Whole samples; the model returns one row for each of the N response tokens that the policy sampled."""
    tokens: slice
    """The positions of these N tokens in the shard's flat token columns."""
    lengths_B: torch.Tensor
    """Number of these tokens of each sample, int64."""


@dataclass(frozen=True)
class PackedShard:
    """The responses that a rank computes on."""

    mini_batches: list[list[MicroBatch]]
    tokens: int
    """Number of response tokens that the policy sampled."""

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of all mini-batches, in the order of their tokens. Each is a heartbeat."""
        for mini_batch in self.mini_batches:
            for micro in mini_batch:
                yield micro
                heart.beat()


def pack_shard(shard: Shard, device: torch.device) -> PackedShard:
    """Pack a shard's micro-batches. Tokens that the policy sampled are targets; the others are only context."""
    samples = _split(shard.tokens, shard.prompt_lengths + shard.response_lengths)
    masks = _target_masks(shard)
    mini_batches: list[list[MicroBatch]] = []
    first = token = 0
    for sizes in shard.mini_batches:
        micros = []
        for size in sizes:
            mine = slice(first, first + size)
            batch = pack_samples(samples[mine], masks[mine]) if size else filler()
            targets = np.array([np.count_nonzero(mask) for mask in masks[mine]], np.int64)
            count = int(targets.sum())
            lengths_B = torch.from_numpy(targets).to(device)
            micros.append(MicroBatch(batch.to(device), slice(token, token + count), lengths_B))
            first, token = first + size, token + count
        mini_batches.append(micros)
    return PackedShard(mini_batches, token)


def _target_masks(shard: Shard) -> list[NDArray[np.bool_]]:
    """Return, for each sample, whether the policy sampled the token."""
    lengths = shard.prompt_lengths + shard.response_lengths
    masks = [np.arange(length) >= prompt for length, prompt in zip(lengths, shard.prompt_lengths, strict=True)]
    if shard.response_mask is not None:
        for mask, sampled in zip(masks, _split(shard.response_mask, shard.response_lengths), strict=True):
            mask[mask] = sampled
    return masks


def _split(values: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Return consecutive parts of an array, of these lengths."""
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
