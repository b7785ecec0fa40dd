"""The samples of each batch, as a function of the seed and the position only, not of the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_rl.data.mixture import Mixture


@dataclass(frozen=True)
class Position:
    """The place of training in its data: what a checkpoint needs to resume with the next batch."""

    epoch: int = 0
    index: int = 0
    """Samples of this epoch that have been used."""


def epoch_order(n: int, seed: int, epoch: int, shuffle: bool, mixture: Mixture | None = None) -> NDArray[np.int64]:
    """Return the order of samples 0..n-1 in one epoch, shape [n]. In a mixture, some are repeated or left out, and an
    epoch has as many as the mixture prescribes."""
    if mixture is not None:
        return mixture.order(seed, epoch, shuffle)
    return np.random.default_rng([seed, epoch]).permutation(n) if shuffle else np.arange(n, dtype=np.int64)


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Return the number of batches in one pass over n samples; the last batch may be smaller."""
    return -(-n // batch_size)


def batches(
    n: int,
    batch_size: int,
    *,
    seed: int,
    shuffle: bool,
    start: Position = Position(),
    mixture: Mixture | None = None,
) -> Iterator[tuple[NDArray[np.int64], Position]]:
    """Yield batches without end, epoch after epoch, each with the position after it.

    The last batch of an epoch holds the remaining samples, fewer than batch_size if n is not a multiple of it: every
    sample is used once per epoch, or as often as the mixture prescribes, and a loss normalised by target tokens needs
    no special case for a small batch.

    Yields:
        sample indices, shape [at most batch_size], and the position to save after they have been used.
    """
    if n < 1:
        raise ValueError("no samples to draw from")
    epoch, index = start.epoch, start.index
    while True:
        order = epoch_order(n, seed, epoch, shuffle, mixture)
        while index < n:
            batch = order[index : index + batch_size]
            index += len(batch)
            yield batch, Position(epoch, index) if index < n else Position(epoch + 1, 0)
        epoch, index = epoch + 1, 0
