"""The share of each data file in an epoch, from weights. A login node computes it before it queues a job."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted


def shares(weights: Mapping[str, float], epoch: int) -> list[int]:
    """Return the number of samples of each file in an epoch.

    They are rounded to whole samples by the largest remainder method.

    Args:
        weights: file -> weight, positive.
        epoch: number of samples in an epoch.

    Raises:
        UserError: a weight is so small that an epoch has no sample of the file.
    """
    sum_of_weights = sum(weights.values())
    exact = [weight / sum_of_weights * epoch for weight in weights.values()]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda file: counts[file] - exact[file])
    for file in by_remainder[: epoch - sum(counts)]:
        counts[file] += 1
    if 0 in counts:
        file, weight = list(weights.items())[counts.index(0)]
        raise UserError(
            f"{file} has the weight {weight:g} of {sum_of_weights:g}, and an epoch of {epoch:,} samples "
            "would have none of this file: raise its weight, or leave it out"
        )
    return counts


def whole_batches(samples: int, batch_size: int) -> int:
    """Return how many of so many samples fill whole batches: the prompts of an epoch of reinforcement learning."""
    return samples - samples % batch_size


def describe(files: Iterable[str], sizes: Sequence[int], counts: Sequence[int]) -> str:
    """Describe an epoch in words.

    Args:
        sizes: number of samples of each file.
        counts: the shares.
    """
    return "; ".join(
        f"{counted(count, 'sample')} of {file} ({count / sum(counts):.1%}; "
        f"each of its {size:,} is used {count / size:.3g} times)"
        for file, size, count in zip(files, sizes, counts, strict=True)
    )
