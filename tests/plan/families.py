"""Small models of each kind of layers, with widths as they are published and few layers: settings of transformers."""

from __future__ import annotations

from typing import Any

_DELTA = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_MAMBA2 = {"mamba_n_heads": 64, "mamba_d_state": 128}

FEW_LAYERS: dict[str, dict[str, Any]] = {
    "bamba": {"hidden_size": 2048, "intermediate_size": 8192, "attn_layer_indices": [3], **_MAMBA2},
    "cohere2": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    "deepseek_v3": {
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
        **{"moe_intermediate_size": 1024, "first_k_dense_replace": 1},
    },
    "falcon_h1": {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 256},
    },
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {"vocab_size_per_layer_input": 32000},
    "glm4_moe_lite": {"n_routed_experts": 16},
    "gpt_oss": {"num_local_experts": 8},
    "granite": {},
    "granitemoehybrid": {
        **{"hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_attention_heads": 12},
        **{"num_key_value_heads": 4, "num_local_experts": 16, "num_experts_per_tok": 4, "mamba_n_heads": 48},
        **{"mamba_d_state": 128, "layer_types": [*["mamba"] * 3, "attention"]},
    },
    "jamba": {
        **{"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 3, "mamba_dt_rank": 64},
    },
    "kimi_linear": {"num_experts": 16},
    "lfm2": {"hidden_size": 2048, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"num_experts": 8, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": {
        **{"hidden_size": 2048, "num_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"ffn_hidden_size": 4096, "expert_ffn_hidden_size": 1024, "n_routed_experts": 16, "zero_expert_num": 8},
        **{"moe_topk": 4},
    },
    "minicpm3": {},
    "minimax": {
        **{"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4},
        **{"num_local_experts": 4},
    },
    "mixtral": {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_local_experts": 8},
    "nemotron_h": {
        **{"hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
        **{"mamba_num_heads": 64, "n_groups": 8, "ssm_state_size": 128, "chunk_size": 128},
        **{"intermediate_size": 10240, "hybrid_override_pattern": "M-M*"},
    },
    "olmo_hybrid": {},
    "qwen3": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8},
    "qwen3_5_moe_text": {"num_experts": 16, **_DELTA},
    "qwen3_5_text": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8, **_DELTA},
    "qwen3_moe": {"num_experts": 16},
    "qwen3_next": {"num_experts": 16, "num_experts_per_tok": 4, **_DELTA},
    "youtu": {},
}
"""model_type -> settings, besides those of `few_layers`."""


def few_layers(kind: str) -> dict[str, Any]:
    """Return the settings of a model of four layers with a small vocabulary."""
    own = FEW_LAYERS[kind]
    layers = {} if kind in ("longcat_flash", "nemotron_h") else {"num_hidden_layers": 5 if kind == "kimi_linear" else 4}
    return {"model_type": kind, "vocab_size": 32000, "pad_token_id": 0, **layers, **own}
