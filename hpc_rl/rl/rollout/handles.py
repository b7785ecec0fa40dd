"""What training workers are told of engines in other processes, and the way of sending weights that fits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpc_rl.rl.weights.sync import Engines, HostSender, Sender, Weights, gpu_sender
from hpc_rl.training.distributed import World

Transfer = Literal["host", "ipc", "nccl"]


@dataclass(frozen=True)
class EngineHandles:
    engines: Engines
    nodes: list[str]
    """Ray's id of each engine's node."""
    transfer: Transfer


def open_sender(weights: Weights, handles: EngineHandles, world: World, bucket_bytes: int, endpoint: str) -> Sender:
    """Every training rank calls this at the same time, while the engines are up.

    Args:
        bucket_bytes: weights on their way at a time.
        endpoint: `host:port` on rank 0's node, free.
    """
    if handles.transfer == "host":
        return HostSender(weights, handles.engines, handles.nodes, world, bucket_bytes)
    return gpu_sender(handles.transfer, weights, handles.engines, world, bucket_bytes, endpoint)
