"""Weights in Ray's object store, from which engines take them when they can. Nobody waits for an engine.

The store has one copy on the node of the first rank, and one on each node whose engines have taken it. Later ones may
copy from any of them.
"""

from __future__ import annotations

from typing import Any

import ray
import torch

from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.rl.weights.buckets import Bucket, aligned, plan_buckets, used_bytes
from hpc_rl.training.parallel.distributed import World


def publish(source: WeightSource, world: World, bucket_bytes: int) -> list[Any]:
    """Put the policy's weights into the object store. Every rank calls this.

    Returns:
        on rank 0, references to the buckets; on the others, nothing. The weights stay as long as one has them.
    """
    tensors, references = iter(source), []
    for entries in plan_buckets(source.metadata(), bucket_bytes):
        world.barrier()  # on the CPU: in the gathers, ranks would wait on their GPUs
        memory = torch.empty(aligned(used_bytes(entries)) if world.rank == 0 else 0, dtype=torch.uint8)
        for entry in entries:
            _, tensor = next(tensors)
            if world.rank == 0:
                entry.view(memory).copy_(tensor)
        if world.rank == 0:
            references.append(ray.put(Bucket(entries, memory.numpy())))
    return references
