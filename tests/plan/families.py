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


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "bamba": [{}, {"attn_layer_indices": [9, 18, 27]}],
    "cohere2_moe": [{}, {"num_shared_experts": 2}],
    "deepseek_v3": [{}, {"q_lora_rank": None}],
    "dots1": [{"layer_types": ["full_attention"] * 62, "n_routed_experts": 8, "n_shared_experts": 2}],
    "falcon_h1": [{}, {"mamba_rms_norm": True, "mamba_d_ssm": None}],
    "gemma4_text": [
        {},
        {
            **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 128},
            **{"num_kv_shared_layers": 10, "use_double_wide_mlp": True, "attention_k_eq_v": True},
            "num_global_key_value_heads": 2,
        },
    ],
    "granitemoehybrid": [
        {},
        {"layer_types": ["mamba", "attention"] * 16, "num_local_experts": 0, "shared_intermediate_size": 8192},
    ],
    "hunyuan_v1_dense": [{"head_dim": 128}],
    "hunyuan_v1_moe": [{"head_dim": 128, "num_experts": 8}],
    "lfm2": [{}, {"full_attn_idxs": [2, 5, 8]}],
    "lfm2_moe": [{"layer_types": ["conv", "full_attention"] * 16}],
    "llama4_text": [{}, {"interleave_moe_layer_step": 2}],
    "minimax_m3_vl_text": [{}, {"mlp_layer_types": [*["dense"] * 3, *["sparse"] * 57]}],
    "ministral": [{"head_dim": 128}],
    "nemotron_h": [{}, {"hybrid_override_pattern": "M-M*-ME"}],
}
"""model_type -> settings besides the defaults, if others are counted too or transformers builds no model from them."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "jamba": {
        **{"model_type": "jamba", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2},
        **{"attn_layer_offset": 4, "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2},
        **{"mamba_d_state": 16, "mamba_dt_rank": 256, "vocab_size": 65536},
    },
    "kimi_linear": {
        **{"model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None},
        **{"first_k_dense_replace": 1, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1},
        **{"moe_intermediate_size": 1024, "vocab_size": 163840},
        "linear_attn_config": {
            **{"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32},
            **{"kda_layers": [n for n in range(1, 28) if n not in (4, 8, 12, 16, 20, 24, 27)]},
            "short_conv_kernel_size": 4,
        },
    },
    "nemotron_h": {
        **{"model_type": "nemotron_h", "hidden_size": 4480, "intermediate_size": 15680, "num_hidden_layers": 56},
        **{"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128},
        **{"mamba_head_dim": 80, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "vocab_size": 131072},
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    },
    "qwen3_next": {
        **{"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
        **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "vocab_size": 151936},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False},
    },
}
"""Settings of Jamba 1.5 Mini, Kimi-Linear-48B-A3B, Nemotron-Nano-9B-v2 and Qwen3-Next-80B-A3B."""


def few_layers(kind: str) -> dict[str, Any]:
    """Return the settings of a model of four layers with a small vocabulary."""
    own = FEW_LAYERS[kind]
    layers = {} if kind in ("longcat_flash", "nemotron_h") else {"num_hidden_layers": 5 if kind == "kimi_linear" else 4}
    return {"model_type": kind, "vocab_size": 32000, "pad_token_id": 0, **layers, **own}


def config_json(kind: str) -> dict[str, Any]:
    """Return the contents of the config.json of such a model."""
    from transformers import AutoConfig

    found: dict[str, Any] = AutoConfig.for_model(**few_layers(kind)).to_dict()
    return found
