"""Data files that are used in given proportions.

The share of a file in an epoch is its weight, divided by the sum of all weights. A file with fewer samples than its
share is repeated, and one with more is used in part. Each file is used in passes: all of its samples are used once
before any is used again, and an epoch continues where the one before it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_rl.data.reading.shares import describe, shares


@dataclass(frozen=True)
class Mixture:
    """How many samples of each file an epoch has."""

    sizes: tuple[int, ...]
    """Samples of each file, which are numbered from 0 over all files."""
    counts: tuple[int, ...]
    """Samples of each file in an epoch."""

    @classmethod
    def of(cls, weights: Mapping[str, float], sizes: Sequence[int], epoch: int) -> Mixture:
        """Return the mixture of files with weights.

        Args:
            weights: file -> weight, positive.
            sizes: number of samples of each file.
            epoch: number of samples in an epoch.

        Raises:
            UserError: a weight is so small that an epoch has no sample of the file.
        """
        return cls(tuple(sizes), tuple(shares(weights, epoch)))

    def describe(self, files: Iterable[str]) -> str:
        """Describe an epoch in words."""
        return f"an epoch has {describe(files, self.sizes, self.counts)}"

    def order(self, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
        """Return the samples of one epoch in their order, shape [sum of counts].

        If shuffle is false, each file keeps its order, and the files alternate evenly.
        """
        starts = np.cumsum([0, *self.sizes[:-1]]).tolist()
        found = np.concatenate(
            [
                start + _drawn(size, epoch * count, count, (seed, file) if shuffle else None)
                for file, (start, size, count) in enumerate(zip(starts, self.sizes, self.counts, strict=True))
            ]
        )
        if shuffle:
            return found[np.random.default_rng([seed, epoch]).permutation(len(found))]
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        return found[np.argsort(places, kind="stable")]


def _drawn(size: int, start: int, count: int, seed: tuple[int, int] | None) -> NDArray[np.int64]:
    """Return the samples from start to start + count - 1 of the passes over a file, shape [count].

    Args:
        seed: (seed, number of the file) of the passes' orders. None: each pass has the order of the file.
    """
    if seed is None:
        return np.arange(start, start + count, dtype=np.int64) % size
    first, last = start // size, (start + count - 1) // size
    # The last number makes these seeds different from those of the orders of epochs.
    passes = [np.random.default_rng([*seed, number, 1]).permutation(size) for number in range(first, last + 1)]
    return np.concatenate(passes)[start - first * size :][:count]
