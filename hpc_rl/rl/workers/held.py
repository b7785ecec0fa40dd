"""A rank's part of a step as packed micro-batches, which all models and updates of the step use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hpc_rl.host.heartbeat import heart
from hpc_rl.rl.dealing import Shard
from hpc_rl.training.models.packed_batch import PackedBatch, filler, pack_samples


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass."""

    batch: PackedBatch
    """Whole samples; the model returns one row for each of the N response tokens."""
    tokens: slice
    """The positions of these N tokens in the shard's flat token columns."""
    lengths_B: torch.Tensor
    """Number of response tokens of each sample, int64."""


@dataclass(frozen=True)
class Held:
    """The responses that a rank computes on."""

    mini_batches: list[list[MicroBatch]]
    tokens: int
    """Number of response tokens."""

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of all mini-batches, in the order of their tokens. Each is a sign of life."""
        for mini_batch in self.mini_batches:
            for micro in mini_batch:
                yield micro
                heart.beat()


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
