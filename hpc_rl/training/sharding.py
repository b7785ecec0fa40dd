"""FSDP2 around a PackedModel: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html

`full` shards parameters, gradients and optimizer state and gathers each layer when it is used. `gradients` keeps layers
gathered from the first forward to the last backward of a step. `none` is the same machinery with shards over one rank
and replicas over all: gradients are all-reduced once per step.
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
    """Shard in place and move to the device. One CPU process needs neither and stays as it is."""
    if world.size == 1 and world.device.type == "cpu":
        return model
    if sharding == "none":
        mesh = init_device_mesh(world.device.type, (world.size, 1), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shards",))
    if world.device.type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        policy = MixedPrecisionPolicy()
    reshard = sharding == "full"
    for layer in model.layers():
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The root holds embeddings and LM head: the backward pass begins with them, so they stay gathered until then.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.to(world.device)  # buffers; the parameters are there already
    return model


def begin_micro_batch(model: PackedModel, sharding: Sharding, last: bool) -> None:
    """Call before each forward pass of a step: only the last one of a step exchanges gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        if sharding != "full":
            model.set_reshard_after_backward(last)


def reshard(model: PackedModel) -> None:
    """After a forward pass without a backward pass: FSDP would keep what it gathered, and save that."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def loss_factor(model: PackedModel, world: World) -> float:
    """FSDP averages gradients over ranks; a loss multiplied by this ends up with their sum."""
    return float(world.size) if isinstance(model, FSDPModule) else 1.0
