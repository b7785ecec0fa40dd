"""A model in 4 bits on several ranks, compared with the same model on one; test_four_bit.py starts this."""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_rl.config.training.common import LoraConfig, ModelConfig, TrainingConfig
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm
from hpc_rl.training.models.four_bit import four_bit_weights
from hpc_rl.training.models.loading import load_sharded, set_adapters
from hpc_rl.training.parallel import distributed
from hpc_rl.training.parallel.distributed import World


def gradients(model: CausalLM) -> dict[str, torch.Tensor]:
    """Return the gradients of the adapters, for the same row on each rank."""
    ids = np.arange(3, 40, dtype=np.int32)
    loss = model(pack_samples([ids], [ids > 3]), lambda hidden_NH, weight_VH: (hidden_NH @ weight_VH.T).square().mean())
    loss.backward()
    found = {name: one.grad for name, one in model.hf.named_parameters() if one.requires_grad}
    assert all(one is not None for one in found.values())
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}


def compare(path: str, world: World) -> list[str]:
    """Return the weights and gradients that differ."""
    source = causal_lm(ModelConfig(path=path, lora=LoraConfig(rank=2, quantize="nf4")))
    model, plain = load_sharded(source, world, TrainingConfig(sharding="full")), source.load()
    set_adapters(plain, TrainingConfig().seed)
    for one in (model, plain):
        for name, parameter in one.hf.named_parameters():
            if ".lora_B." in name:
                nn.init.constant_(parameter, 0.01)
    ours, theirs = four_bit_weights(model.hf), four_bit_weights(plain.hf)
    assert ours.keys() == theirs.keys() and len(ours) == 14
    other = [name for name, weight in ours.items() if not torch.equal(weight.dequantized(), theirs[name].dequantized())]
    found, expected = gradients(model), gradients(plain)
    assert found.keys() == expected.keys() and max(float(one.abs().max()) for one in expected.values()) > 1e-4
    return other + [
        name for name, one in found.items() if not torch.allclose(one, expected[name], atol=1e-6, rtol=1e-3)
    ]


if __name__ == "__main__":
    world = distributed.start("cpu", start_timeout_s=600)
    print("found", json.dumps([compare(path, world) for path in json.loads(sys.argv[1])]))
    distributed.finish()
