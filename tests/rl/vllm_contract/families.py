"""Small models with random weights of the families whose weights travel to vLLM, and their weights after a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.training.models.causal_lm import CausalLM, load_model
from hpc_rl.training.models.stored_form import StoredForm
from tests.small_models.families import DEFAULT, make_model

ROOM = 42
"""Tokens of a prompt and its response."""
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    **{
        kind: {} for kind in ("cohere2", "falcon_h1", "gemma3", "gemma3_text", "gpt_oss", "granite", "granitemoehybrid")
    },
    **{kind: {} for kind in ("jamba", "lfm2_moe", "olmo2", "olmo3", "phi3", "smollm3")},
    **{kind: {"num_experts": DEFAULT} for kind in ("gemma4", "gemma4_text")},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), DELTA),
    "deepseek_v3": {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "lfm2": {"block_dim": 128, "conv_dim": 128},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3},
}
"""model_type -> settings for which vLLM has kernels."""


def make_family(folder: Path, kind: str) -> Path:
    """Save a model."""
    return make_model(folder, kind, **FAMILIES[kind])


def changed(folder: Path, dtype: str) -> CausalLM:
    """Return the policy as a trainer loads it, with other weights than those in its folder."""
    model = load_model(ModelConfig(path=str(folder), dtype=dtype), ROOM)
    model.eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in (*model.hf.parameters(), *_buffers(model)):
            weight.add_((torch.randn(weight.shape, generator=generator) * 0.05).to(weight.dtype))
    return model


def _buffers(model: CausalLM) -> list[torch.Tensor]:
    """Return the buffers that files contain."""
    names = model.hf.state_dict().keys()
    return [buffer for name, buffer in model.hf.named_buffers() if name in names]


def sent(model: CausalLM, dtype: str) -> list[tuple[str, torch.Tensor]]:
    """Return the weights that a trainer sends to an engine of this type."""
    found = WeightSource(model.hf, getattr(torch, dtype), stored=StoredForm(model.hf))
    return [(name, weight.detach().clone()) for name, weight in found]
