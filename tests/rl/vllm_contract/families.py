"""Small models with random weights of the families whose weights travel to vLLM, and their weights after a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.training.models.causal_lm import CausalLM, load_model
from hpc_rl.training.models.stored_form import StoredForm
from tests.training.models.test_families import NONE, OWN, small

ROOM = 42
"""Tokens of a prompt and its response."""
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
"""For which vLLM has kernels of attention."""
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
MAMBA = {"mamba_d_state": 16}
TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("gemma3_text", "gpt_oss", "granite", "jamba")},
    **{kind: {} for kind in ("olmo2", "olmo3", "phi3", "smollm3")},
    **dict.fromkeys(("cohere2", "gemma3"), TIED),
    **{kind: {"num_experts": NONE, "global_head_dim": 32} for kind in ("gemma4", "gemma4_text")},
    "falcon_h1": {**MAMBA, "mamba_norm_before_gate": False},
    "granitemoehybrid": MAMBA,
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3},
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), DELTA),
    **{kind: {**DELTA, **EXPERTS} for kind in ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")},
    "deepseek_v3": {**EXPERTS, **LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "lfm2": {"block_dim": 64, "conv_dim": 64, **TIED},
    "lfm2_moe": {**EXPERTS, **TIED},
}
"""model_type -> settings of its own."""
WRAPPERS = ("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe")
"""Those with parts that read images."""


def make_family(folder: Path, kind: str) -> Path:
    """Save a model."""
    default = AutoConfig.for_model(kind)
    parts = {name: getattr(default, name, None) for name in type(default).sub_configs}
    if kind == "gemma4":
        parts["vision_config"] = AutoConfig.for_model("gemma4_vision")
    nested = {
        name: {**_sized(part, kind, name == "text_config"), "model_type": part.model_type}
        for name, part in parts.items()
        if part is not None
    }
    config = AutoConfig.for_model(kind, **{**nested, **_sized(default, kind, True)})
    auto = transformers.AutoModelForImageTextToText if kind in WRAPPERS else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # so that attention is not uniform
    model.save_pretrained(folder)
    return folder


def _sized(config: Any, kind: str, is_text: bool) -> dict[str, Any]:
    """Return the settings of a small model, or of a part of it."""
    known = config.to_dict().keys() | type(config).attribute_map.keys()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    is_wrapper = kind in WRAPPERS and config.model_type == kind
    own = OWN.get(config.model_type, {})
    return small(config, {**sizes, **own, **({} if is_wrapper else FAMILIES[kind])} if is_text else own)


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
