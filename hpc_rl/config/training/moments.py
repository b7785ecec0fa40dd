"""AdamW's moments in 8 bits (optim.moments): which weights have them, and the bytes that they take. The trainer stores
them, and the plan counts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Moments = Literal["float32", "8bit"]
LARGEST_BLOCK = 256
"""Most values that share a scale, as in https://arxiv.org/abs/2110.02861 and in torchao."""
SMALLEST_BLOCK = 16
"""Fewest values that share a scale, which takes a quarter as much memory as they do."""
FEWEST = 4096
"""Values of the smallest weight whose moments have 8 bits, as in https://arxiv.org/abs/2110.02861."""
SCALE_BYTES = 4


def block_of(shape: Sequence[int]) -> int | None:
    """Return how many neighbouring values of a weight's moments share a scale; None if its moments have no 8 bits.

    A block is a part of a row, which is what the last dimension has. FSDP gives each rank whole rows, so that no number
    of ranks divides a block. Norms and biases have no rows.

    Args:
        shape: of the whole weight.
    """
    if len(shape) < 2 or math.prod(shape) < FEWEST:
        return None
    return next((size for size in range(LARGEST_BLOCK, SMALLEST_BLOCK - 1, -1) if shape[-1] % size == 0), None)


def saved_by_eight_bits(shape: Sequence[int], itemsize: int) -> float:
    """Return the bytes that 8 bits save of each value of a weight, in one of its moments.

    Args:
        itemsize: bytes of a value of the weight.
    """
    block = block_of(shape)
    return 0.0 if block is None else itemsize - (1 + SCALE_BYTES / block)
