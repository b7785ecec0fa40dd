"""The automatic choice of `trainer.sharding`, which the trainer makes and the plan of a job predicts."""

from __future__ import annotations

from typing import Literal

STATE_BYTES = 16
"""Bytes per trained parameter of weight, gradient and AdamW's two moments, each float32."""
NODE_SHARE = 0.25
"""Part of each device's memory that the states may take if `auto` is to choose hybrid. The rest holds a critic of the
same size, a reference, activations, and gathered layers."""


def auto_sharding(
    state_bytes: int, ranks: int, ranks_per_node: int | None, memory: int | None
) -> Literal["full", "hybrid", "none"]:
    """Return the sharding that `auto` stands for.

    Args:
        state_bytes: bytes of all parameters, gradients and optimizer states of the model.
        ranks: of the whole job.
        ranks_per_node: None if nodes have different numbers of ranks.
        memory: bytes of memory of each device; None on CPUs.
    """
    fits = bool(ranks_per_node and memory) and state_bytes / (ranks_per_node or 1) <= NODE_SHARE * (memory or 0)
    if not fits:
        return "full"
    return "hybrid" if ranks > 1 else "none"
