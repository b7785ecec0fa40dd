"""FSDP2 around a PackedModel: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html

`full` shards parameters, gradients and optimizer state over all ranks. Each layer is gathered when it is used, and its
gradient is reduced after each micro-batch, so that no rank ever holds the gradient of the whole model. `hybrid` does so
within each node, and every node has the whole model: only gradients travel between nodes, once per step. `gradients`
keeps the layers gathered from the first forward to the last backward pass of a step. `none` replicates the model: each
rank holds one complete shard. These two exchange gradients, and convert weights to bfloat16, once per step. One rank
that has the whole model needs no FSDP: see models/compute_weights.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpc_rl.config.training.common import Sharding
from hpc_rl.config.training.sharding import STATE_BYTES, auto_sharding
from hpc_rl.errors import UserError
from hpc_rl.training.models.causal_lm import PackedModel
from hpc_rl.training.models.compute_weights import ComputeWeights
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.perf import memory_bytes

Model = TypeVar("Model", bound=PackedModel)


class ShardingOptions(Protocol):
    """What the sharding of a model depends on in the section `trainer`."""

    @property
    def sharding(self) -> str: ...
    @property
    def reduce_dtype(self) -> str: ...


def is_sharded(world: World) -> bool:
    """Return whether models have parts, or copies to compute with; in a single CPU process they have neither."""
    return world.size > 1 or world.device.type != "cpu"


def shard(model: Model, world: World, trainer: ShardingOptions) -> Model:
    """Shard a model, which may be on the meta device, in place; return it.

    Raises:
        UserError: trainer.sharding is hybrid, and the nodes have different numbers of ranks; or the installed versions
            cannot train experts on several ranks.
    """
    if not is_sharded(world):
        return model
    # A frozen weight has no gradient and no moments.
    state_bytes = sum(p.numel() * (STATE_BYTES if p.requires_grad else p.itemsize) for p in model.parameters())
    # All ranks need the same answer, also if their devices differ.
    memory = world.broadcast(memory_bytes(world.device))
    model.sharding = choose(trainer.sharding, state_bytes, world, memory)
    if world.size == 1 and model.sharding == "none":
        model.compute_weights = ComputeWeights(model, model.float32_modules())
        for module in model.modules():  # as fully_shard does
            module._buffers.update({name: part.to(world.device) for name, part in module.named_buffers(recurse=False)})
        return model
    mesh = _mesh(model.sharding, world, dist.group.WORLD)
    policy = _policy(world.device, trainer)
    reshard = model.sharding in ("full", "hybrid")
    for module in model.float32_modules():
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        fully_shard(module, mesh=mesh, mp_policy=exact, reshard_after_forward=reshard)
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The root holds embeddings and LM head. The backward pass begins with them, so they stay gathered until then.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # With transformers 4, an expert that no token of a rank has chosen has no gradient there. FSDP would leave it out
    # on that rank, and ranks would reduce tensors of different lengths.
    if isinstance(model, FSDPModule) and reduces_unused():
        model.set_reduce_scatter_unused_params(True)
    elif any(".experts.0." in name and weight.requires_grad for name, weight in model.named_parameters()):
        raise UserError(
            f"{world.size} ranks cannot train a mixture of experts with transformers 4 and torch {torch.__version__}: "
            "install transformers 5 or torch 2.13"
        )
    return model


def reduces_unused() -> bool:
    """Return whether this version of torch can reduce parameters that have no gradient."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def choose(requested: str, state_bytes: int, world: World, memory: int | None) -> Sharding:
    """Return the sharding of a model; only `auto` depends on its size.

    Args:
        state_bytes: bytes of all parameters, gradients and optimizer states.
        memory: bytes of memory of each device; None on CPUs.

    Raises:
        UserError: hybrid is requested, and the nodes have different numbers of ranks.
    """
    ranks = world.ranks_per_node
    if requested == "hybrid" and ranks is None:
        raise UserError(
            "trainer.sharding=hybrid needs the same number of ranks on each node, and this job's nodes have different "
            "numbers: use trainer.sharding=full, or nodes of equal size"
        )
    if requested == "auto":
        requested = auto_sharding(state_bytes, world.size, ranks, memory)
    if requested == "hybrid" and ranks == world.size:
        return "full"  # on one node they are the same
    if requested == "gradients" and world.size == 1:
        return "none"
    return requested  # type: ignore[return-value]  # one of the remaining values of trainer.sharding


def begin_micro_batch(model: PackedModel, trainer: ShardingOptions, last: bool) -> None:
    """Prepare a forward pass, after which gradients are exchanged as the sharding requires.

    Args:
        last: whether this is the last micro-batch of an optimizer step.
    """
    if not isinstance(model, FSDPModule):
        return
    if model.sharding in ("full", "hybrid"):
        # FSDP would add up micro-batches in bfloat16, so such gradients travel between nodes each time.
        model.set_requires_all_reduce(last or trainer.reduce_dtype == "bfloat16")
        return
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last)


def reshard(model: PackedModel) -> None:
    """Release gathered or converted weights after a forward pass without a backward pass, or at the end of a step's
    backward passes: what follows needs the weights themselves."""
    if model.compute_weights is not None:
        model.compute_weights.leave()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_divided(model: PackedModel) -> bool:
    """Return whether a model consists of parts, or has copies to compute with; see is_sharded."""
    return isinstance(model, FSDPModule) or model.compute_weights is not None


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, outside of autograd."""
    own: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach()  # type: ignore[no-any-return]


def loss_factor(model: PackedModel, world: World) -> float:
    """Return the factor by which to multiply a loss to sum gradients over ranks, which FSDP averages."""
    return float(world.size) if isinstance(model, FSDPModule) else 1.0


@cache
def _mesh(sharding: Sharding, world: World, _group: dist.ProcessGroup | None) -> DeviceMesh:
    """Return the ranks as a mesh. All models of a process group share it, and with it the communicators."""
    shards = {"none": 1, "hybrid": world.ranks_per_node or 1}.get(sharding, world.size)
    kind, names = world.device.type, ("replicas", "shards")
    if sharding in ("none", "hybrid"):
        rows = [list(range(first, first + shards)) for first in range(0, world.size, shards)]
        row, column = divmod(world.rank, shards)
        # A mesh that makes its groups itself gives them torch's time limit: 10 minutes for NCCL.
        groups = [world.new_group(part) for part in ([ranks[column] for ranks in rows], rows[row])]
        members = [[world.in_job(rank) for rank in ranks] for ranks in rows]
        return DeviceMesh.from_group(groups, kind, members, mesh_dim_names=names)
    return DeviceMesh.from_group(world.group or dist.group.WORLD, kind, mesh_dim_names=names[1:])


def _policy(device: torch.device, trainer: ShardingOptions) -> MixedPrecisionPolicy:
    """Return the types of computation and of the exchange of gradients: on CPUs those of the weights."""
    reduce_dtype = getattr(torch, trainer.reduce_dtype)
    if device.type != "cpu":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return MixedPrecisionPolicy(reduce_dtype=reduce_dtype if reduce_dtype is torch.bfloat16 else None)
