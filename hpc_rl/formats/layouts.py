"""The layouts of processes and GPUs that `hpc-rl doctor --train` is to cover.

Libraries have code that runs only with several ranks, engines, GPUs or nodes. Each layout below runs code that
the others do not run. `hpc_rl.probes.acceptance.table.CHECKS` states which layouts each check covers, and the report of
the doctor names the layouts that were not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple


class Covered(StrEnum):
    """The layouts, in words for the report."""

    ONE_RANK = "training on 1 rank"
    SHARDED = "training sharded over 2 or more ranks of a node"
    HYBRID = "training with hybrid sharding over 2 or more nodes of 2 or more ranks"
    MANY_NODES = "training over more than 2 nodes"
    SEQUENCE_2 = "training with sequence parallelism over 2 ranks"
    SEQUENCE_4 = "training with sequence parallelism over 4 ranks"
    RESUMED = "checkpoint and resume on 2 or more ranks"
    HOST_3 = "weights through host memory from 3 or more trainer ranks to engines on other devices"
    IPC_1 = "weights by CUDA IPC from 1 trainer rank to 1 engine on its GPU"
    IPC_2 = "weights by CUDA IPC from 2 or more trainer ranks to an engine on the GPU of each (the default)"
    IPC_TP2 = "weights by CUDA IPC to 1 engine of a node with tensor parallelism 2"
    IPC_TP2_2 = "weights by CUDA IPC to 2 or more engines of a node with tensor parallelism 2"
    IPC_TP4 = "weights by CUDA IPC to engines with tensor parallelism 4"
    NCCL_1 = "weights by NCCL from 1 trainer rank to 1 engine"
    NCCL_3 = "weights by NCCL from 3 or more trainer ranks to 1 engine of a node"
    NCCL_2_2 = "weights by NCCL from 2 or more trainer ranks to 2 or more engines of a node"
    NCCL_TP2 = "weights by NCCL to 1 engine of a node with tensor parallelism 2"
    NCCL_TP2_2 = "weights by NCCL to 2 or more engines of a node with tensor parallelism 2"
    NCCL_TP4 = "weights by NCCL to engines with tensor parallelism 4"
    NCCL_NODES = "weights by NCCL to engines on 2 or more nodes"
    COMPILED_2 = "2 or more compiled engines of a node, started twice"
    COMPILED_TP2_2 = "2 or more compiled engines of a node with tensor parallelism 2, started twice"
    TP8 = "engines with tensor parallelism 8"
    ADAPTERS = "adapters from 2 or more trainer ranks to engines (rollout.merge_lora=false)"
    STALE = "generation during training (rollout.staleness) on several GPUs"
    ROLE_POOLS = "critic, reference or reward model on GPUs of their own"
    RL_SEQUENCE = "reinforcement learning with sequence parallelism"


WITHOUT_CHECK = (Covered.TP8, Covered.ADAPTERS, Covered.STALE, Covered.ROLE_POOLS, Covered.RL_SEQUENCE)
"""Layouts that no check covers."""


class Sending(NamedTuple):
    """A run whose weights go from trainer ranks to engines in other processes."""

    transfer: str
    """Name in `hpc_rl.rl.weights.transfers.WEIGHT_TRANSFERS`."""
    trainers: int
    """Ranks of all nodes that send."""
    engines: int
    """Engines of each node."""
    parallel: int = 1
    """GPUs of an engine."""
    nodes: int = 1
    """Nodes with engines."""
    shared: bool = False
    """Whether the engines use the devices of the trainer."""


_SENDING: Mapping[Covered, Callable[[Sending], bool]] = {
    Covered.HOST_3: lambda it: it.transfer == "host" and it.trainers >= 3 and not it.shared,
    Covered.IPC_1: lambda it: it[:4] == ("ipc", 1, 1, 1),
    Covered.IPC_2: lambda it: it.transfer == "ipc" and it.parallel == 1 and it.engines >= 2,
    Covered.IPC_TP2: lambda it: it.transfer == "ipc" and it.parallel == 2 and it.engines == 1,
    Covered.IPC_TP2_2: lambda it: it.transfer == "ipc" and it.parallel == 2 and it.engines >= 2,
    Covered.IPC_TP4: lambda it: it.transfer == "ipc" and it.parallel == 4,
    Covered.NCCL_1: lambda it: it[:5] == ("nccl", 1, 1, 1, 1),
    Covered.NCCL_3: lambda it: it.transfer == "nccl" and it.parallel == it.engines == 1 and it.trainers >= 3,
    Covered.NCCL_2_2: lambda it: it.transfer == "nccl" and it.parallel == 1 and min(it.trainers, it.engines) >= 2,
    Covered.NCCL_TP2: lambda it: it.transfer == "nccl" and it.parallel == 2 and it.engines == 1,
    Covered.NCCL_TP2_2: lambda it: it.transfer == "nccl" and it.parallel == 2 and it.engines >= 2,
    Covered.NCCL_TP4: lambda it: it.transfer == "nccl" and it.parallel == 4,
    Covered.NCCL_NODES: lambda it: it.transfer == "nccl" and it.nodes >= 2,
}


def covered_by(sending: Sending) -> list[Covered]:
    """Return the layouts that a run covers."""
    return [layout for layout, fits in _SENDING.items() if fits(sending)]
