"""Folders of tiny models with the structure that models of this year have on the hub, made without a download.

config.json has the keys of the published files: the kinds of layers in their order, wrappers with the parts for images,
experts, latent attention, and rotary embeddings of two lengths. The weights are random, in bfloat16 and under the names
of the published files, and the tokenizer has the chat template of the family.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.probes.tiny_model import make_tokenizer
from tests.data.families import FAMILIES as TEMPLATES

VOCABULARY = 320
IMAGE, VIDEO, BEGIN, END = 316, 317, 318, 319
"""Token ids of images in wrappers, which no text has."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERT = {"shared_expert_intermediate_size": 16, "norm_topk_prob": True, "router_aux_loss_coef": 0.001}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
THREE_OF_FOUR = ["linear_attention"] * 3 + ["full_attention"]
QWEN35 = {
    **DELTA,
    "layer_types": THREE_OF_FOUR,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.5,
    },
}
QWEN35_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
QWEN35_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]


@dataclass(frozen=True)
class Tiny:
    """One family: what its config.json contains besides the sizes that all have."""

    model_type: str
    text: dict[str, Any]
    """Settings of the text model, besides `TEXT`. None leaves one of those out."""
    template: str
    """The chat template: a row of tests/data/families.py."""
    architecture: str = ""
    """The class of the files. Empty: the one that AutoModelForCausalLM takes."""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Configurations of further parts of a wrapper: vision_config, audio_config."""
    outer: dict[str, Any] = field(default_factory=dict)
    """Settings of a wrapper itself."""
    float32: tuple[str, ...] = ()
    """Ends of the names of weights that the published files have in float32; the others are in bfloat16."""
    unused: tuple[str, ...] = ()
    """Names of weights in the published files that transformers' class does not have."""

    def settings(self) -> dict[str, Any]:
        """Return the contents of config.json, without the tokens that end texts."""
        text = {key: value for key, value in {**TEXT, **self.text}.items() if value is not None}
        if not self.parts:
            return {"model_type": self.model_type, **text}
        return {
            "model_type": self.model_type,
            "tie_word_embeddings": text["tie_word_embeddings"],
            **self.outer,
            "text_config": text,
            **self.parts,
        }


FAMILIES = {
    "qwen3.5": Tiny(
        "qwen3_5",
        {**QWEN35, "model_type": "qwen3_5_text", "tie_word_embeddings": True},
        "qwen3.5",
        "Qwen3_5ForConditionalGeneration",
        {"vision_config": {"model_type": "qwen3_5", **QWEN35_VISION}},
        QWEN35_TOKENS,
        ("linear_attn.A_log", "linear_attn.norm.weight"),
        ("mtp.fc.weight", "mtp.norm.weight"),
    ),
    "qwen3.5-moe": Tiny(
        "qwen3_5_moe",
        {**QWEN35, **EXPERTS, **SHARED_EXPERT, "model_type": "qwen3_5_moe_text", "intermediate_size": None},
        "qwen3.5",
        "Qwen3_5MoeForConditionalGeneration",
        {"vision_config": {"model_type": "qwen3_5_moe", **QWEN35_VISION}},
        QWEN35_TOKENS,
        ("linear_attn.A_log", "linear_attn.norm.weight"),
        ("mtp.fc.weight", "mtp.norm.weight"),
    ),
    "qwen3-next": Tiny(
        "qwen3_next",
        {
            **{**DELTA, **EXPERTS, **SHARED_EXPERT, "full_attention_interval": 4, "partial_rotary_factor": 0.25},
            **{"rope_theta": 10000000, "rope_scaling": None, "decoder_sparse_step": 1, "mlp_only_layers": []},
        },
        "qwen3-2507",
    ),
    "olmo-hybrid": Tiny(
        "olmo_hybrid",
        {
            **{**DELTA, "layer_types": THREE_OF_FOUR, "linear_allow_neg_eigval": True, "num_key_value_heads": 4},
            **{"linear_num_key_heads": 4, "rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
        },
        "olmo2",
    ),
    "granite4": Tiny(
        "granitemoehybrid",
        {
            **{**MAMBA2, "layer_types": ["mamba", "mamba", "attention", "mamba"], "position_embedding_type": "nope"},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "head_dim": None},
            **{"shared_intermediate_size": 32, "logits_scaling": 4, "embedding_multiplier": 12},
            **{"residual_multiplier": 0.22, "attention_multiplier": 0.125, "rope_theta": 10000},
            **{"router_aux_loss_coef": 0.01, "output_router_logits": False, "tie_word_embeddings": True},
        },
        "granite3",
    ),
    "lfm2": Tiny(
        "lfm2",
        {
            **{"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3, "conv_bias": False},
            **{"block_auto_adjust_ff_dim": True, "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0},
            **{"block_multiple_of": 16, "block_dim": 32, "conv_dim": 32, "conv_dim_out": 32, "norm_eps": 1e-5},
            **{"rope_theta": 1000000.0, "tie_embedding": True, "tie_word_embeddings": None, "rms_norm_eps": None},
            **{"num_heads": 4, "use_pos_enc": True, "head_dim": None, "attention_bias": None},
        },
        "lfm2",
    ),
    "nemotron-h": Tiny(
        "nemotron_h",
        {
            **{"hybrid_override_pattern": "ME*E-M", "num_hidden_layers": 6, "mamba_num_heads": 4, "mamba_head_dim": 8},
            **{"ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16, "expand": 2},
            **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"routed_scaling_factor": 2.5, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
            **{"layer_norm_epsilon": 1e-5, "rms_norm_eps": None, "use_conv_bias": True, "use_bias": False},
        },
        "nemotron-3",
        float32=("mixer.A_log", "mixer.D"),
    ),
    "falcon-h1": Tiny(
        "falcon_h1",
        {
            **{**MAMBA2, "mamba_d_ssm": 64, "mamba_rms_norm": False, "mamba_norm_before_gate": False},
            **{"mamba_use_mlp": True, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9},
            **{"embedding_multiplier": 5.6, "key_multiplier": 0.4, "lm_head_multiplier": 0.04},
            **{"mlp_multipliers": [0.88, 0.3], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23},
            **{"ssm_multipliers": [0.35, 0.25, 0.2, 0.5, 0.35], "rope_theta": 1e11, "num_logits_to_keep": 1},
        },
        "chatml-with-marks",
    ),
    "phi4-mini": Tiny(
        "phi3",
        {
            **{"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 4.0, 8.0]}},
            **{"original_max_position_embeddings": 64, "partial_rotary_factor": 0.75, "rope_theta": 10000.0},
            **{"sliding_window": 262144, "tie_word_embeddings": True, "head_dim": None, "resid_pdrop": 0.0},
        },
        "phi4-mini",
    ),
    "gemma3": Tiny(
        "gemma3",
        {
            **{"model_type": "gemma3_text", "layer_types": WINDOWS, "sliding_window": 16, "query_pre_attn_scalar": 8},
            **{"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "tie_word_embeddings": True},
            **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "hidden_activation": "gelu_pytorch_tanh"},
        },
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {"vision_config": SIGLIP},
        {"mm_tokens_per_image": 4, "boi_token_index": BEGIN, "eoi_token_index": END, "image_token_index": IMAGE},
    ),
    "gemma4": Tiny(
        "gemma4",
        {
            **{"model_type": "gemma4_text", "layer_types": WINDOWS, "sliding_window": 16, "global_head_dim": 16},
            **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
            **{"layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 30.0},
            **{"vocab_size_per_layer_input": VOCABULARY, "tie_word_embeddings": True},
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    **{"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
                },
            },
        },
        "gemma4",
        "Gemma4ForConditionalGeneration",
        {
            "vision_config": {
                **{"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
                **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4},
                **{"position_embedding_size": 16, "pooling_kernel_size": 2},
            },
            "audio_config": {
                **{"model_type": "gemma4_audio", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
                **{"subsampling_conv_channels": [8, 4], "output_proj_dims": 32},
            },
        },
        {
            **{"boi_token_id": BEGIN, "eoi_token_id": END, "image_token_id": IMAGE, "video_token_id": VIDEO},
            **{"boa_token_id": 315, "eoa_token_index": 314, "audio_token_id": 313},
        },
    ),
    "deepseek-v3": Tiny(
        "deepseek_v3",
        {
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
            **{"num_key_value_heads": 4, "head_dim": None, "n_routed_experts": 4, "n_shared_experts": 1},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2},
            **{"topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"},
            **{"topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "rope_theta": 10000},
            "rope_scaling": {
                **{"type": "yarn", "factor": 32, "original_max_position_embeddings": 64, "beta_fast": 32},
                **{"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        },
        "deepseek-v3",
    ),
    "gpt-oss": Tiny(
        "gpt_oss",
        {
            **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2, "attention_bias": True},
            **{"swiglu_limit": 7.0, "router_aux_loss_coef": 0.9, "rope_theta": 150000, "initial_context_length": 64},
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                "original_max_position_embeddings": 64,
            },
        },
        "gpt-oss",
    ),
    "llama4": Tiny(
        "llama4_text",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "intermediate_size": 32},
            **{"interleave_moe_layer_step": 1, "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 64},
            **{"attn_temperature_tuning": True, "floor_scale": 64, "attn_scale": 0.1, "use_qk_norm": True},
            **{"rope_theta": 500000.0, "for_llm_compressor": False},
        },
        "llama4",
    ),
}
"""Families of this year, by their names in tests and tables."""


def make(folder: Path, family: str) -> Path:
    """Create the folder of a tiny model: config.json as published, weights, tokenizer and chat template."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    own = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_family_tokenizer(own.template)
    settings = own.settings()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for part in (settings, settings.get("text_config")):
        if part is not None:
            part.update({**ends, "bos_token_id": tokenizer.bos_token_id, "dtype": "bfloat16"})
    (folder / "config.json").write_text(json.dumps(settings))
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, own.architecture) if own.architecture else transformers.AutoModelForCausalLM
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = (kind._from_config if own.architecture else kind.from_config)(config)
    torch.set_rng_state(state)
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if weight.is_floating_point() and not name.endswith((*own.float32, "inv_freq")):
            weight.data = weight.data.bfloat16()
    model.save_pretrained(folder)
    if own.unused:
        weights = load_file(folder / "model.safetensors")
        weights |= {name: torch.zeros(4, dtype=torch.bfloat16) for name in own.unused}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    named = {
        "architectures": stored["architectures"],
        **settings,
        "transformers_version": stored["transformers_version"],
    }
    (folder / "config.json").write_text(json.dumps(named, indent=2))
    tokenizer.save_pretrained(folder)
    return folder


def make_family_tokenizer(template: str) -> Any:
    """Make a byte-level tokenizer with the chat template and the special tokens of a family."""
    from tokenizers import AddedToken

    family = TEMPLATES[template]
    tokenizer = make_tokenizer(VOCABULARY - 30)
    named = [*dict.fromkeys([*family.special.split(), family.eos, *filter(None, [family.bos])])]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in named])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added.split()])
    tokenizer.eos_token, tokenizer.bos_token = family.eos, family.bos or None
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = family.template
    assert len(tokenizer) <= VOCABULARY
    return tokenizer
