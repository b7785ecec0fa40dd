"""Models loaded on several ranks and compared with those that transformers loads whole; test_loading.py starts this."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.errors import UserError
from hpc_rl.training.models.causal_lm import PackedModel, causal_lm
from hpc_rl.training.models.loading import load_sharded, weights_of
from hpc_rl.training.models.pretrained import Pretrained
from hpc_rl.training.models.scalar_model import critic, reward_model
from hpc_rl.training.parallel import distributed
from hpc_rl.training.parallel.distributed import World


def pretrained(role: str, path: str, dtype: str) -> Pretrained[Any]:
    """The model of a role."""
    config = ModelConfig(path=path, dtype=dtype)  # type: ignore[arg-type]
    if role == "critic":
        return critic(path, config)
    if role == "reward":
        return reward_model(path, config, getattr(torch, dtype))
    return causal_lm(config, trained=role == "policy")


def difference(model: PackedModel, plain: PackedModel) -> str | None:
    """What is not the same in both; None if nothing is. Every rank calls this."""
    ours, theirs = weights_of(model.hf), weights_of(plain.hf)
    if ours.keys() != theirs.keys():
        return f"names: {sorted(ours.keys() ^ theirs.keys())}"
    for name, weight in ours.items():
        if isinstance(model.hf.get_parameter(name), torch.nn.Parameter) and not isinstance(weight, DTensor):
            return f"{name} is not sharded"
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if whole.dtype != theirs[name].dtype or not torch.equal(whole, theirs[name]):
            return name
    for (name, ours_), (_, theirs_) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        if ours_.dtype != theirs_.dtype or not torch.equal(ours_, theirs_):
            return f"buffer {name}"
    for (name, ours_), (_, theirs_) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if ours_.requires_grad != theirs_.requires_grad:
            return f"requires_grad of {name}"
    modes = [(m.training, type(m).__name__.removeprefix("FSDP")) for m in model.modules()]
    if modes != [(m.training, type(m).__name__) for m in plain.modules()]:
        return "training mode or classes"
    if plain.hf.can_generate() and generation_settings(model) != generation_settings(plain):
        return "generation_config"
    return None if model.hf.config.to_dict() == plain.hf.config.to_dict() else "config"


def generation_settings(model: PackedModel) -> dict[str, Any]:
    """The settings that are not empty."""
    return {name: value for name, value in model.hf.generation_config.to_dict().items() if value}


def compare(case: dict[str, str], world: World) -> str:
    """Load one model twice; return what was found."""
    source = pretrained(case["role"], case["path"], case.get("dtype", "float32"))
    state = torch.get_rng_state()
    try:
        model = load_sharded(source, world, TrainingConfig(sharding=case.get("sharding", "full")))  # type: ignore[arg-type]
    except UserError as error:
        return str(error)
    if case.get("random_state") and not torch.equal(state, torch.get_rng_state()):
        return "the random state has changed"
    return difference(model, source.load()) or "same"


if __name__ == "__main__":
    world = distributed.start("cpu", start_timeout_s=600)
    print("found", json.dumps([compare(case, world) for case in json.loads(sys.argv[1])]))
    distributed.finish()
