"""A rank's part of a step, ready to compute on: packed once, used by every model and update of the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hpc_rl.rl.dealing import Shard
from hpc_rl.training.packed_batch import PackedBatch, filler, pack_samples


@dataclass(frozen=True)
class MicroBatch:
    batch: PackedBatch
    """Whole samples; its N rows are the response tokens."""
    tokens: slice
    """Where these N tokens are in the shard's flat token columns."""
    lengths_B: torch.Tensor
    """Response tokens of each sample, int64."""


@dataclass(frozen=True)
class Held:
    mini_batches: list[list[MicroBatch]]
    tokens: int
    """Response tokens in all."""

    def micro_batches(self) -> Iterator[MicroBatch]:
        for mini_batch in self.mini_batches:
            yield from mini_batch


def hold(shard: Shard, device: torch.device) -> Held:
    """Pack a shard's micro-batches."""
    lengths = shard.prompt_lengths + shard.response_lengths
    samples = np.split(shard.tokens, np.cumsum(lengths)[:-1]) if len(lengths) else []
    mini_batches: list[list[MicroBatch]] = []
    first = token = 0
    for sizes in shard.mini_batches:
        micros = []
        for size in sizes:
            mine = slice(first, first + size)
            responses = shard.response_lengths[mine]
            masks = [
                np.arange(length) >= prompt
                for length, prompt in zip(lengths[mine], shard.prompt_lengths[mine], strict=True)
            ]
            batch = pack_samples(samples[mine], masks) if size else filler()
            count = int(responses.sum())
            lengths_B = torch.from_numpy(responses.copy()).to(device)
            micros.append(MicroBatch(batch.to(device), slice(token, token + count), lengths_B))
            first, token = first + size, token + count
        mini_batches.append(micros)
    return Held(mini_batches, token)
