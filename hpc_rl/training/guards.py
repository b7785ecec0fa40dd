"""Failures that the user can correct, explained in one line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from hpc_rl.errors import AgreedRunError, RunError
from hpc_rl.training import memory_snapshot

IN_TRAINING = (
    "lower trainer.micro_tokens, or set model.enable_gradient_checkpointing=true, "
    "or use more processes with trainer.sharding=full"
)
IN_GENERATION = "lower rollout.max_num_seqs"


@contextmanager
def explain_out_of_memory(what: str, remedy: str = IN_TRAINING) -> Iterator[None]:
    """Turn an out-of-memory error into a RunError that names the settings to change.

    Args:
        what: the activity, for the message ("step 12").
        remedy: the settings to change.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # The CPU allocator raises a plain RuntimeError.
        known = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not known:
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        snapshot = memory_snapshot.write() if isinstance(error, torch.OutOfMemoryError) else None
        more = f"; what fills the memory: {snapshot}, shown by https://docs.pytorch.org/memory_viz" if snapshot else ""
        raise RunError(f"out of memory in {what}: {remedy} ({first}){more}") from error


def refuse_not_finite(step: int, losses_by_rank: Mapping[int, float], gradient_norm: float) -> None:
    """Stop training at NaN or Inf. Every rank must pass the same values.

    Raises:
        AgreedRunError: a value is not finite; the message names the step and the ranks.
    """
    bad = [rank for rank, loss in losses_by_rank.items() if not math.isfinite(loss)]
    if bad:
        found = f"the loss is {losses_by_rank[bad[0]]} in step {step} on rank {', '.join(map(str, bad[:8]))}"
    elif not math.isfinite(gradient_norm):
        found = f"the gradient norm is {gradient_norm} in step {step}"
    else:
        return
    raise AgreedRunError(
        f"{found}: training stopped before the weights changed. "
        "Usual causes: optim.lr is too high, samples are broken, or the weights are bfloat16 but float32 is needed"
    )
