"""The share of each data file in an epoch, from weights. A login node computes it before it queues a job."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpc_rl.errors import UserError


def shares(files: Sequence[str], sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the number of samples of each file in an epoch, which has as many as all files together.

    They are rounded to whole samples by the largest remainder method.

    Args:
        sizes: number of samples of each file, at least 1.
        weights: of each file, positive.

    Raises:
        UserError: a weight is so small that an epoch has no sample of the file.
    """
    total, sum_of_weights = sum(sizes), sum(weights)
    exact = [weight / sum_of_weights * total for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(files)), key=lambda file: counts[file] - exact[file])
    for file in by_remainder[: total - sum(counts)]:
        counts[file] += 1
    if 0 in counts:
        file = counts.index(0)
        raise UserError(
            f"{files[file]} has the weight {weights[file]:g} of {sum_of_weights:g}, and an epoch of {total:,} samples "
            "would have none of this file: raise its weight, or leave it out"
        )
    return counts


def describe(files: Sequence[str], sizes: Sequence[int], counts: Sequence[int]) -> str:
    """Describe the share of each file, in words."""
    return "; ".join(
        f"{count:,} samples of {file} ({count / sum(counts):.1%}; "
        f"each of its {size:,} is used {count / size:.3g} times)"
        for file, size, count in zip(files, sizes, counts, strict=True)
    )
