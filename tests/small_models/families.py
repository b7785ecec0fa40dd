"""One table of small models with random weights and the structure of the published ones: a family is one row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from hpc_rl.probes.tiny_model import make_tokenizer
from tests.helpers import of_this_transformers

VOCABULARY = 320
DEFAULT = object()
"""Leaves a setting as transformers has it."""
SMALL = {
    **{"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 64, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"bos_token_id": 1, "attention_dropout": 0.0, "residual_dropout": 0.0, "tie_word_embeddings": False},
    **{"d_model": 128, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_decoder_layers": 2},
    **{"embedding_size": 128, "lru_width": 128, "attention_window_size": 8, "mm_tokens_per_image": 4},
    **{"projector_hidden_size": 128, "text_hidden_size": 128},
}
"""Sizes, of which a family receives those that its configuration has."""
TWO_WINDOWS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 6}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"num_key_value_heads": 4}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
}
OF_VLLM = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""For which vLLM has kernels."""
DEEPSEEK = {**LATENT, **OF_VLLM, "rope_parameters": YARN, "n_shared_experts": 1, "head_dim": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.02 * index for index in range(16)],
    "long_factor": [2.0 + 0.2 * index for index in range(16)],
    "original_max_position_embeddings": 64,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 8}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
SHARED = {"shared_expert_intermediate_size": 64}
VISION = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
    **{"num_key_value_heads": 2, "image_size": 28, "patch_size": 14, "depth": 1, "embed_dim": 32, "num_heads": 2},
    **{"out_hidden_size": 128, "output_dim": 128, "projection_dim": 128, "num_position_embeddings": 16},
    **{
        "deepstack_visual_indexes": [0],
        "fullatt_block_indexes": [0],
        "position_embedding_size": 64,
        "mm_embed_dim": 128,
    },
}
"""The same of parts that read images."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            **{"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        }
    },
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen2_moe": {**SHARED, "num_experts": 4},
    "qwen3_moe": {},
    "mixtral": {},
    "olmoe": {"num_key_value_heads": 4},
    "olmo": {"clip_qkv": 8.0},
    "olmo2": {},
    "olmo3": TWO_WINDOWS,
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 6, "query_pre_attn_scalar": 32},
    "gemma3_text": {"tie_word_embeddings": True, **TWO_WINDOWS, "query_pre_attn_scalar": 32},
    "gemma3": {},
    "gemma3n_text": {
        **{"tie_word_embeddings": True, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 8},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6},
        **{"activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "intermediate_size": [192] * 4},
    },
    "gemma4_text": {"tie_word_embeddings": True, **TWO_WINDOWS, "global_head_dim": 64, "num_experts": None},
    "gemma4": {},
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "sliding_window": 20},
    "phimoe": {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6},
    "granite": {
        **{"tie_word_embeddings": True, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
        **{"residual_multiplier": 0.5, "attention_multiplier": 0.2},
    },
    "granitemoe": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "granitemoehybrid": {
        **{**MAMBA2, "mamba_n_groups": 1, "shared_intermediate_size": 64, "logits_scaling": 2.0},
        **{"layer_types": ["mamba", "attention", "mamba"], "residual_multiplier": 0.5},
    },
    "cohere": {"tie_word_embeddings": True, "logit_scale": 0.25},
    "cohere2": {"tie_word_embeddings": True, "logit_scale": 0.25, **TWO_WINDOWS},
    "smollm3": {"tie_word_embeddings": True, "no_rope_layers": [1, 1, 0]},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"head_dim": 32, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True},
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 48, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "ernie4_5": {"tie_word_embeddings": True},
    "exaone4": TWO_WINDOWS,
    "hunyuan_v1_dense": {"tie_word_embeddings": True},
    "minimax": {
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "block_size": 8},
        "linear_attn_alpha_factor": 1.5,
    },
    "minimax_m2": {"rotary_dim": 16, "intermediate_size": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    "lfm2": {
        **{"tie_word_embeddings": True, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
        **{"block_dim": 128, "conv_dim": 128, "conv_dim_out": 128},
    },
    "lfm2_moe": {
        **{"tie_word_embeddings": True, "layer_types": ["conv", "full_attention", "conv"]},
        **{"conv_L_cache": 3, "num_dense_layers": 1},
    },
    "qwen3_next": {**DELTA, **SHARED},
    "qwen3_5_text": DELTA,
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "olmo_hybrid": DELTA,
    "nemotron_h": {
        **{"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "mlp"]},
        **{"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8},
        "moe_shared_expert_intermediate_size": 64,
    },
    "falcon_h1": {
        **{
            **MAMBA2,
            "mamba_d_ssm": 256,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_in_multiplier": 0.5,
            "lm_head_multiplier": 2.0,
        },
    },
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "jamba": {
        **{"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"mamba_d_state": 8, "use_mamba_kernels": False},
    },
    "kimi_linear": {
        **{**LATENT, **OF_VLLM, "linear_head_dim": 32, "linear_num_heads": 4, "layer_types": DELTA["layer_types"]},
        "n_shared_experts": 1,
    },
    "mistral3": {"text_config": {"sliding_window": None}},
    "llama4_text": {
        **{"layer_types": ["chunked_attention", "chunked_attention", "full_attention"], "attention_chunk_size": 128},
        **{"no_rope_layers": [1, 1, 0], "intermediate_size_mlp": 192, "num_experts_per_tok": 1},
    },
    "seed_oss": {},
    "starcoder2": {"tie_word_embeddings": True, "sliding_window": 6},
    "apertus": {},
    "nanochat": {},
}
"""model_type -> the settings that matter for its structure: families of the table in docs/models.md."""

LATENT_QUERIES = {**LATENT, "q_lora_rank": 48}
ROTARY = {"rotary_dim": 32}
UNPADDED = {"unpadded_vocab_size": VOCABULARY}
MAMBA1 = {"n_mamba_heads": 8, "mamba_d_state": 16}
IN_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 8]}}
WITHOUT_WINDOW = {"text_config": {"sliding_window": None}}
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa"), LATENT_QUERIES),
    **dict.fromkeys(("minicpm3", "sarvam_mla", "youtu"), LATENT_QUERIES),
    **dict.fromkeys(("codegen", "gptj"), ROTARY),
    **dict.fromkeys(("inkling2_loop_text", "inkling2_text"), UNPADDED),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), IN_SECTIONS),
    **dict.fromkeys(("qwen3_vl_moe_text", "glm4v_text"), IN_SECTIONS),
    "bailing_hybrid": {
        **{**LATENT, "linear_head_dim": 32, "linear_num_heads": 4, "layer_types": DELTA["layer_types"]},
        "n_shared_experts": 1,
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v32": {
        **{**LATENT_QUERIES, "n_shared_experts": 1, "head_dim": 32},
        **{"index_topk": 8, "index_n_heads": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": 128, "adapter_out_dim": 128},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"], "adapter_in_dim": 32, "adapter_out_dim": 128},
    "falcon": {"head_dim": DEFAULT},
    "falcon_mamba": {"state_size": 16},
    "gemma4_unified_text": {**TWO_WINDOWS, "global_head_dim": 64},
    "glm4v_moe_text": {"rope_parameters": {**IN_SECTIONS["rope_parameters"], "mrope_section": [2, 2, 4]}},
    "gpt_neo": {"attention_types": [[["global", "local", "local"], 1]], "window_size": 8},
    "lara_mini": {**DELTA, "layer_types": ["linear_attention", "sliding_attention", "full_attention"], **SHARED},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv"]},
    **dict.fromkeys(("llava", "llava_next"), WITHOUT_WINDOW),
    "longcat_flash": {
        **{**LATENT_QUERIES, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 64},
        **{"moe_topk": 2, "zero_expert_num": 2},
    },
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 2, "state_size": 16},
    "ministral": TWO_WINDOWS,
    "prophetnet": {"num_hidden_layers": DEFAULT, "num_encoder_layers": 1},
    "qwen3_5_moe_text": {**DELTA, **SHARED},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "phi": {"partial_rotary_factor": 0.5},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "vaultgemma": TWO_WINDOWS,
    "xlnet": {"max_position_embeddings": DEFAULT, "d_head": 32},
    "zamba": {**MAMBA1, "layer_types": ["mamba", "hybrid", "mamba"]},
    "zamba2": {
        **{**MAMBA1, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
        **{"mamba_ngroups": 1, "mamba_headdim": 32, "num_mem_blocks": 1},
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""The same of other families and parts, which have a row if `SMALL` does not suffice."""


def settings_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Return all settings of a small model.

    Args:
        changes: further settings of the language model.
    """
    default = AutoConfig.for_model(kind)
    tokenizer = make_tokenizer(VOCABULARY)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    own = dict(_row(kind))
    parts: dict[str, Any] = {}
    for name, known in type(default).sub_configs.items():
        part = getattr(default, name, None)
        if part is None and name == "vision_config" and known is not AutoConfig:  # audio stays away
            part = known()
        if part is not None:
            sizes = VISION if name == "vision_config" else SMALL
            more = {**ends, **changes} if name == "text_config" else {}
            settings = {**_row(part.model_type), **own.pop(name, {}), **more}
            parts[name] = {"model_type": part.model_type, **_small(part, sizes, settings)}
    if "text_config" not in parts:
        return {**_small(default, SMALL, {**own, **ends, **changes}), **parts}
    places = sorted(name for name in default.to_dict() if name.endswith(("_token_id", "_token_index")))
    images = {name: VOCABULARY - number for number, name in enumerate(places, 1) if name not in ("bos_token_id", *ends)}
    tied = {"tie_word_embeddings": parts["text_config"].get("tie_word_embeddings", False)}
    return {**_small(default, SMALL, {**images, **tied, **own, **ends}), **parts}


def _row(kind: str) -> Mapping[str, Any]:
    return FAMILIES.get(kind) or OTHERS.get(kind, {})


def _small(config: Any, sizes: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    known = config.to_dict().keys() | {alias for alias, name in type(config).attribute_map.items() if name not in sizes}
    settings = {**{key: value for key, value in sizes.items() if key in known}, **own}
    return {key: value for key, value in settings.items() if value is not DEFAULT}


def make_model(folder: Path, kind: str, auto: str = "", spread: bool = True, **changes: Any) -> Path:
    """Save a small model as a user has it: the class of its files, a tokenizer, and a chat template.

    Args:
        auto: the class that chooses its class; empty: with the part for images, if it has one.
        spread: whether weights matter more than those that transformers draws.
        changes: further settings of the language model.
    """
    settings = settings_of(kind, **changes) if kind in CONFIG_MAPPING else {}
    config = AutoConfig.for_model(kind, **of_this_transformers(kind, settings))
    if not auto:
        auto = "AutoModelForImageTextToText" if "vision_config" in config.sub_configs else "AutoModelForCausalLM"
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32)
    if spread:
        _spread(model)
    torch.set_rng_state(state)
    model.save_pretrained(folder)
    make_tokenizer(VOCABULARY).save_pretrained(folder)
    return folder


@torch.no_grad()
def _spread(model: torch.nn.Module) -> None:
    """Give all weights values that matter: attention that is not uniform, norms that are not 1, biases that are not 0.

    Also the biases of routers that are buffers, which the files contain.
    """
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.ndim > 1 and isinstance(weight, torch.nn.Parameter):
            if weight.any():
                weight.mul_(3)
            else:
                weight.normal_(std=0.05)
        elif isinstance(weight, torch.nn.Parameter) or name.endswith("correction_bias"):
            weight.add_(0.1 * torch.randn_like(weight))


def config_json(folder: Path) -> dict[str, Any]:
    """Return the settings in a folder."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
