"""FSDP2 around a PackedModel: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html

`full` shards parameters, gradients and optimizer state, and gathers each layer when it is used. `gradients` keeps the
layers gathered from the first forward to the last backward pass of a step. `none` replicates the model: each rank holds
one complete shard, and gradients are all-reduced once per step.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpc_rl.training.distributed import World
from hpc_rl.training.model import PackedModel

Sharding = Literal["full", "gradients", "none"]
Model = TypeVar("Model", bound=PackedModel)


def shard(model: Model, world: World, sharding: Sharding) -> Model:
    """Shard a model in place and move it to the device; return it. A single CPU process leaves it unchanged."""
    if world.size == 1 and world.device.type == "cpu":
        return model
    if sharding == "none":
        mesh = init_device_mesh(world.device.type, (world.size, 1), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shards",))
    if world.on_accelerator:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        policy = MixedPrecisionPolicy()
    reshard = sharding == "full"
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The root holds embeddings and LM head. The backward pass begins with them, so they stay gathered until then.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.to(world.device)  # buffers; the parameters have been moved by fully_shard
    return model


def begin_micro_batch(model: PackedModel, sharding: Sharding, last: bool) -> None:
    """Prepare a forward pass, of which only the last one in a step exchanges gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        if sharding != "full":
            model.set_reshard_after_backward(last)


def reshard(model: PackedModel) -> None:
    """Release gathered parameters after a forward pass without a backward pass; FSDP would otherwise save them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def loss_factor(model: PackedModel, world: World) -> float:
    """Return the factor by which to multiply a loss to sum gradients over ranks, which FSDP averages."""
    return float(world.size) if isinstance(model, FSDPModule) else 1.0
