"""The small models of tests/small_models/families.py as folders that look as published ones on the hub do this year.

config.json has the keys of the published files. The weights are in bfloat16 and under the names of the published files,
and the tokenizer has the chat template of the family.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.probes.tiny_model import make_tokenizer
from tests.data.families import FAMILIES as TEMPLATES
from tests.small_models.families import VOCABULARY, settings_of

SIZES = {"max_position_embeddings": 2048, "initializer_range": 0.05}
MAMBA2 = {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False}
OF_QWEN35: dict[str, Any] = {
    **{
        "full_attention_interval": 3,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
    },
    "rope_parameters": {
        **{"mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default", "rope_theta": 10000000},
        "partial_rotary_factor": 0.5,
    },
}
ROUTED = {"norm_topk_prob": True, "router_aux_loss_coef": 0.001}


@dataclass(frozen=True)
class Published:
    """One family: what its config.json contains besides the settings of the small model."""

    kind: str
    """Its model_type: a row of tests/small_models/families.py."""
    template: str
    """The chat template: a row of tests/data/families.py."""
    text: dict[str, Any]
    """Settings of the language model. None leaves one out that the small model has."""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of other parts of a wrapper: vision_config, audio_config."""
    float32: tuple[str, ...] = ()
    """Ends of the names of weights that the published files have in float32; the others are in bfloat16."""
    unused: tuple[str, ...] = ()
    """Names of weights in the published files that transformers' class does not have."""

    def settings(self) -> dict[str, Any]:
        """Return the contents of config.json, without the tokens that end texts."""
        found = settings_of(self.kind, **{**SIZES, **self.text})
        parts = {name: {**found.get(name, {}), **part} for name, part in self.parts.items()}
        if "text_config" in found:
            parts["text_config"] = _present(found["text_config"])
        return {"model_type": self.kind, **_present(found), **parts}


def _present(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


FAMILIES = {
    "qwen3.5": Published(
        "qwen3_5",
        "qwen3.5",
        {**OF_QWEN35, "tie_word_embeddings": True},
        {"vision_config": {"model_type": "qwen3_5"}},
        ("linear_attn.A_log", "linear_attn.norm.weight"),
        ("mtp.fc.weight", "mtp.norm.weight"),
    ),
    "qwen3.5-moe": Published(
        "qwen3_5_moe",
        "qwen3.5",
        {**OF_QWEN35, **ROUTED},
        {"vision_config": {"model_type": "qwen3_5_moe"}},
        ("linear_attn.A_log", "linear_attn.norm.weight"),
        ("mtp.fc.weight", "mtp.norm.weight"),
    ),
    "qwen3-next": Published(
        "qwen3_next",
        "qwen3-2507",
        {
            **{**ROUTED, "full_attention_interval": 3, "layer_types": None, "partial_rotary_factor": 0.25},
            **{"rope_theta": 10000000, "decoder_sparse_step": 1, "mlp_only_layers": []},
        },
    ),
    "olmo-hybrid": Published(
        "olmo_hybrid",
        "olmo2",
        {
            **{"linear_allow_neg_eigval": True, "num_key_value_heads": 4, "linear_num_key_heads": 4},
            "rope_parameters": {"rope_theta": 500000, "rope_type": "default"},
        },
    ),
    "granite4": Published(
        "granitemoehybrid",
        "granite3",
        {
            **{**MAMBA2, "position_embedding_type": "nope", "embedding_multiplier": 12, "attention_multiplier": 0.125},
            **{"router_aux_loss_coef": 0.01, "output_router_logits": False, "rope_theta": 10000},
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": Published(
        "lfm2",
        "lfm2",
        {
            **{"conv_bias": False, "block_auto_adjust_ff_dim": True, "block_ff_dim": 288, "block_multiple_of": 16},
            **{"block_ffn_dim_multiplier": 1.0, "block_dim": 128, "conv_dim": 128, "conv_dim_out": 128},
            **{"norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_embedding": True, "tie_word_embeddings": None},
            **{"num_heads": 4, "use_pos_enc": True},
        },
    ),
    "nemotron-h": Published(
        "nemotron_h",
        "nemotron-3",
        {
            **{"hybrid_override_pattern": "ME*E-M", "num_hidden_layers": 6, "layers_block_type": None},
            **{"conv_kernel": 4, "expand": 2, "n_shared_experts": 1, "norm_topk_prob": True},
            **{"routed_scaling_factor": 2.5, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
            **{"layer_norm_epsilon": 1e-5, "use_conv_bias": True, "use_bias": False},
        },
        float32=("mixer.A_log", "mixer.D"),
    ),
    "falcon-h1": Published(
        "falcon_h1",
        "chatml-with-marks",
        {
            **{**MAMBA2, "mamba_rms_norm": False, "mamba_norm_before_gate": False, "mamba_use_mlp": True},
            **{"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9, "embedding_multiplier": 5.6},
            **{"key_multiplier": 0.4, "lm_head_multiplier": 0.04, "mlp_multipliers": [0.88, 0.3]},
            **{"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23, "num_logits_to_keep": 1},
            **{"ssm_multipliers": [0.35, 0.25, 0.2, 0.5, 0.35], "rope_theta": 1e11},
        },
    ),
    "phi4-mini": Published(
        "phi3",
        "phi4-mini",
        {
            "rope_parameters": None,
            "rope_scaling": {
                **{"type": "longrope", "short_factor": [1.0 + 0.1 * number for number in range(12)]},
                "long_factor": [1.0 + number for number in range(12)],
            },
            **{"partial_rotary_factor": 0.75, "rope_theta": 10000.0, "sliding_window": 262144, "resid_pdrop": 0.0},
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": Published(
        "gemma3",
        "gemma3",
        {
            **{"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "hidden_activation": "gelu_pytorch_tanh"},
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    ),
    "gemma4": Published(
        "gemma4",
        "gemma4",
        {
            **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_experts": None},
            **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    **{"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
                },
            },
        },
        {
            "audio_config": {
                **{"model_type": "gemma4_audio", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
                **{"subsampling_conv_channels": [8, 4], "output_proj_dims": 32},
            }
        },
    ),
    "deepseek-v3": Published(
        "deepseek_v3",
        "deepseek-v3",
        {
            **{"n_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid"},
            **{"topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "rope_theta": 10000},
            "head_dim": None,
            "rope_scaling": {
                **{"type": "yarn", "factor": 32, "original_max_position_embeddings": 64, "beta_fast": 32},
                **{"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        },
    ),
    "gpt-oss": Published(
        "gpt_oss",
        "gpt-oss",
        {
            **{"experts_per_token": 2, "attention_bias": True, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.9},
            **{"rope_theta": 150000, "initial_context_length": 64},
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama4": Published(
        "llama4_text",
        "llama4",
        {
            **{"layer_types": None, "interleave_moe_layer_step": 1, "attn_temperature_tuning": True, "floor_scale": 64},
            **{"attn_scale": 0.1, "use_qk_norm": True, "rope_theta": 500000.0, "for_llm_compressor": False},
        },
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
    auto = (
        transformers.AutoModelForImageTextToText if "vision_config" in settings else transformers.AutoModelForCausalLM
    )
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = auto.from_config(config)
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
