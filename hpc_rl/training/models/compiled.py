"""Layers that torch.compile translates, each as one graph for rows with any number of samples.

`auto` compiles on GPUs if every layer is of a kind that the tests compile, and first tries it: each rank compiles two
layers of the model's size and computes their gradients, by itself and without a collective. If the compiler is missing
on one node, or nothing can be executed in a folder, then no rank compiles, and the job goes on.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from hpc_rl.config.training.common import LoraConfig, ModelConfig
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import PackedModel
from hpc_rl.training.parallel.distributed import World

FAMILIES = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
"""model_type of the models whose layers `auto` compiles: tests/training/models/test_compiled_layers.py compiles each of
them as whole graphs, and checks that another number of samples compiles nothing again."""

_TRIAL = {"num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""Settings of the model with which a rank tries the compiler: two layers, because some models have two kinds."""


def compile_layers(model: PackedModel, config: ModelConfig, world: World) -> None:
    """Compile the layers of a model as model.use_torch_compile requests. Every rank calls this.

    If layers that `auto` would compile are not compiled, one line gives the reason.
    """
    if config.use_torch_compile == "auto":
        if not is_automatic(model, config, world.device):
            return
        problems = world.gather(problem_of(model, config, world.device))
        found = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
        if found:
            rank, problem = found[0]
            if world.is_main:
                where = f"rank {world.in_job(rank)}"
                print(f"layers are not compiled, because this failed on {where}: {problem}", flush=True)
            return
    if config.use_torch_compile:
        for layer in model.layers():
            layer.compile(dynamic=True)


def is_automatic(model: PackedModel, config: ModelConfig, device: torch.device) -> bool:
    """Return whether `auto` compiles such a model on this device."""
    return (
        device.type == "cuda"  # elsewhere, attention is not an operator
        and not config.use_liger
        and not config.enable_activation_offload  # TorchDynamo does not trace its hooks
        and config.lora.quantize is None  # the kernels of 4 bits are not torch's
        and model.hf.config.model_type in FAMILIES
    )


def problem_of(model: PackedModel, config: ModelConfig, device: torch.device) -> str | None:
    """Compile two layers of this kind and size, and compute their gradients; return what fails, in one line.

    torch's random state and the compiled code of other models stay as they were, apart from caches on disk.
    """
    try:
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type), torch.device(device):
            trial = _trial(model, config)
            ids = [np.arange(3, 3 + length) for length in (5, 9)]
            batch = pack_samples(ids, [np.arange(len(one)) > 0 for one in ids]).to(device)
            for layer in trial.layers():
                layer.compile(dynamic=True)
            trial.hidden(batch).float().sum().backward()
    except Exception as error:  # noqa: BLE001 - compilers raise many types, and layers work without them
        cause = getattr(error, "inner_exception", None) or error  # of TorchDynamo's BackendCompilerFailed
        return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
    return None


def _trial(model: PackedModel, config: ModelConfig) -> PackedModel:
    """Return a model of the same kind with few layers and random weights, in the type of computation."""
    settings = copy.deepcopy(model.hf.config)
    kinds = getattr(settings, "layer_types", None)
    for name, value in _TRIAL.items():
        setattr(settings, name, value)
    if kinds:
        settings.layer_types = kinds[: settings.num_hidden_layers]
    build: Any = type(model.hf)
    hf = build._from_config(settings, attn_implementation=model.hf.config._attn_implementation, dtype=torch.bfloat16)
    trial = PackedModel(hf)
    trial.prepare_training(config.updated("lora", LoraConfig()))
    return trial
