"""Steps with moments in 8 bits on several ranks, for comparison with one rank; test_eight_bit.py starts this."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hpc_rl.config.training.common import LoraConfig, ModelConfig, OptimConfig, TrainingConfig
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.optim import build_optimizer, set_lr
from hpc_rl.training.parallel import distributed
from hpc_rl.training.parallel.distributed import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
Training = tuple[CausalLM, torch.optim.Optimizer]


def begin(case: dict[str, Any], world: World) -> Training:
    """Return the model of a case, and its optimizer."""
    config = ModelConfig(path=case["model"], lora=LoraConfig(rank=case.get("rank")))
    model = load_sharded(causal_lm(config), world, TrainingConfig(sharding=case.get("sharding", "full")))
    return model, build_optimizer(model, OptimConfig(moments="8bit", weight_decay=0.1))


def step(training: Training, number: int) -> None:
    """Take a step with gradients that depend on its number only, and a rate of its own."""
    model, optimizer = training
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        whole = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = whole
    set_lr(optimizer, 1e-3 * number)
    optimizer.step()


def tensors(training: Training) -> dict[str, torch.Tensor]:
    """Return all trained weights and the state of the optimizer, whole."""
    model, optimizer = training
    names: dict[nn.Parameter, str] = {one: name for name, one in model.named_parameters() if one.requires_grad}
    found = {name: one.detach() for one, name in names.items()}
    found |= {f"{names[one]}.{key}": value for one, state in optimizer.state.items() for key, value in state.items()}
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).clone() for name, one in found.items()}


def save(training: Training, folder: Path, world: World) -> None:
    """Write a checkpoint."""
    model_state.write(folder, model_state.snapshot(*training, None, world, copy=True), world)


def run(case: dict[str, Any], world: World) -> None:
    """Take two steps, write a checkpoint, and take a third step. Take the third step also after reading `case["read"]`.
    The tensors after these are in the folder of the case."""
    training, folder = begin(case, world), Path(case["folder"])
    for number in (1, 2):
        step(training, number)
    save(training, folder / "checkpoint", world)
    resumed = begin(case, world)
    model_state.read(Path(case["read"]), *resumed, world)
    for name, each in {"own": training, "resumed": resumed}.items():
        step(each, 3)
        found = tensors(each)
        if world.is_main:
            torch.save(found, folder / f"{name}.pt")


if __name__ == "__main__":
    world = distributed.start("cpu", start_timeout_s=600)
    for each in json.loads(sys.argv[1]):
        run(each, world)
    distributed.finish()
