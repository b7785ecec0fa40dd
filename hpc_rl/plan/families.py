"""What differs from Llama in the layers of each family of models, and the standard names of its settings.

Vectors are written as in `2H N`: two of the hidden size and one number for each head. Letters: H hidden size, I inner
size of the MLP, Q all query heads, K all key heads, D one head, N number of heads, E number of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import has_mixers

Mixer = Literal["delta", "delta parts", "kimi", "lightning", "mamba", "mamba2", "convolution"]
"""The kinds of layers with a state; `delta parts` has a projection for each of its inputs."""


@dataclass(frozen=True)
class Family:
    """The layers of a type of models."""

    norms: str = "2H"
    """Vectors of each layer, without those of its parts: norms, then their biases."""
    final: str = "H"
    """Vectors outside of the layers."""
    attention: str = ""
    """Vectors of attention, without biases: norms of queries and keys, sinks."""
    mlp: str = ""
    """Vectors of a usual MLP, without biases."""
    router: str = ""
    """Vectors of a router."""
    biases: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias")
    """The settings that give biases to queries, keys and values; to the result of attention; and to the MLP."""
    gate: Literal["", "whole", "heads"] = ""
    """Whether attention's result is multiplied with a gate, of its width or for each head."""
    is_gated: bool = True
    """Whether the MLP multiplies two projections."""
    is_fused: tuple[bool, bool] = (False, False)
    """Whether the projections to queries, keys and values, and those of the MLP, are one linear layer."""
    is_scored: bool = False
    """Whether attention has soft-capped scores or sinks."""
    mixer: Mixer | None = None
    """The layers with a state."""
    is_parallel: bool = False
    """Whether each layer has a mixer and attention."""
    is_single: bool = False
    """Whether a layer is either a mixer, attention, or an MLP."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a config.json may leave out, by their standard names."""


_QWEN = Family(attention="2D")
_DELTA = Family(attention="2D", gate="whole", mixer="delta", defaults={"full_attention_interval": 4})
_TIED = {"tie_word_embeddings": True}
_EVERYWHERE = {"biased": True}
_ALL_BIASED = ("biased", "biased", "biased")
_GEMMA3 = Family(norms="4H", attention="2D", defaults={**_TIED, "sliding_window_pattern": 6})
_FIRST_DENSE = {"num_dense_layers": 1}
_LATENT = Family()
_OLMO2 = Family(attention="Q K")
_GPT2 = Family("2H 2H", "2H", biases=_ALL_BIASED, is_gated=False, is_fused=(True, False), defaults=_TIED | _EVERYWHERE)

FAMILIES: dict[str, Family] = {
    "afmoe": Family(norms="4H", attention="2D", gate="whole", router="E", defaults=_FIRST_DENSE),
    "apertus": Family(attention="2D", mlp="2", is_gated=False),
    "arcee": Family(is_gated=False),
    "aria_text": Family(),
    "axk1": Family(router="H"),
    "bamba": Family(mixer="mamba2"),
    "bitnet": Family(attention="Q", mlp="I"),
    "cohere": Family(norms="H", defaults=_TIED),
    "cohere2": Family(norms="H", defaults={**_TIED, "sliding_window_pattern": 4}),
    "cohere2_moe": Family(norms="H", defaults={**_TIED, "sliding_window_pattern": 4}),
    "cwm": Family(),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "diffllama": Family(attention="4D"),
    "dots1": _QWEN,
    "ernie4_5": Family(biases=("use_bias",) * 3, defaults=_TIED),
    "ernie4_5_moe": Family(biases=("use_bias",) * 3, router="E", defaults=_TIED),
    "exaone4": _QWEN,
    "exaone_moe": Family(attention="2D", defaults=_FIRST_DENSE),
    "falcon_h1": Family(mixer="mamba2", is_parallel=True),
    "flex_olmo": _OLMO2,
    "gemma": Family(defaults=_TIED),
    "gemma2": Family(norms="4H", is_scored=True, defaults={**_TIED, "sliding_window_pattern": 2, "capped": True}),
    "gemma3_text": _GEMMA3,
    "gemma3n_text": Family(norms="4H", attention="2D", defaults={**_TIED, "capped": True}),
    "gemma4_text": Family(norms="4H", attention="2D", router="4H E", defaults=_TIED | {"global_head_dim": 512}),
    "gemma4_unified_text": Family(norms="4H", attention="2D", defaults=_TIED | {"global_head_dim": 512}),
    "glm": Family(biases=("attention_bias", "", ""), is_fused=(False, True)),
    "glm4": Family(norms="4H", biases=("attention_bias", "", ""), is_fused=(False, True)),
    "glm4_moe": Family(biases=("attention_bias", "", "")),
    "glm4_moe_lite": Family(defaults=_FIRST_DENSE),
    "gpt-sw3": _GPT2,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": Family("2H 2H", "2H", biases=_ALL_BIASED, is_gated=False, is_fused=(True, False), defaults=_EVERYWHERE),
    "gpt_oss": Family(
        attention="N",
        is_scored=True,
        defaults={"attention_bias": True, "experts_biased": True, "sliding_window_pattern": 2},
    ),
    "granite": Family(),
    "granite_swa": Family(attention="N", is_scored=True, defaults=_TIED),
    "granitemoe": Family(),
    "granitemoe_swa": Family(attention="N", is_scored=True),
    "granitemoehybrid": Family(mixer="mamba2"),
    "granitemoeshared": Family(),
    "helium": Family(),
    "hunyuan_v1_dense": _QWEN,
    "hunyuan_v1_moe": Family(attention="2D", defaults={"num_shared_experts": 1}),
    "hy_v3": Family(attention="2D", defaults=_FIRST_DENSE),
    "hyperclovax": Family(norms="4H"),
    "jais2": Family("2H 2H", "2H", is_gated=False, defaults={"attention_bias": True, "mlp_bias": True}),
    "jamba": Family(mixer="mamba"),
    "kimi_linear": Family(mixer="kimi", defaults=_FIRST_DENSE),
    "laguna": Family(attention="2D", gate="heads", router="E", defaults=_FIRST_DENSE),
    "lfm2": Family(attention="2D", mixer="convolution", defaults=_TIED | {"block_auto_adjust_ff_dim": True}),
    "lfm2_moe": Family(attention="2D", mixer="convolution", defaults=_TIED | {"num_dense_layers": 2}),
    "llama": Family(),
    "llama4_text": Family(defaults={"num_shared_experts": 1}),
    "longcat_flash": _LATENT,
    "mellum": _QWEN,
    "mimo_v2_flash": Family(is_scored=True, defaults=_FIRST_DENSE),
    "minicpm3": Family(defaults=_TIED),
    "minimax": Family(mixer="lightning"),
    "minimax_m2": _OLMO2,
    "minimax_m3_vl_text": _QWEN,
    "ministral": Family(),
    "ministral3": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "nanochat": Family("", "", is_gated=False, defaults={"capped": True}),
    "nemotron_h": Family(norms="H", mixer="mamba2", is_gated=False, is_single=True),
    "olmo": Family("", ""),
    "olmo2": _OLMO2,
    "olmo3": Family(attention="Q K", defaults={"sliding_window_pattern": 4}),
    "olmo_hybrid": Family(attention="Q K", mixer="delta parts", defaults={"full_attention_interval": 4}),
    "olmoe": _OLMO2,
    "persimmon": Family(
        *("2H 2H", "2H", "4D"), biases=_ALL_BIASED, is_gated=False, is_fused=(True, False), defaults=_EVERYWHERE
    ),
    "phi3": Family(is_fused=(True, True)),
    "phimoe": Family("2H 2H", "2H"),
    "qwen2": Family(biases=("biased", "", "mlp_bias"), defaults=_EVERYWHERE),
    "qwen2_moe": Family(biases=("biased", "", ""), defaults=_EVERYWHERE | {"shared_gate": True}),
    "qwen3": _QWEN,
    "qwen3_5_moe_text": Family(
        attention="2D", gate="whole", mixer="delta", defaults={"full_attention_interval": 4, "shared_gate": True}
    ),
    "qwen3_5_text": _DELTA,
    "qwen3_moe": _QWEN,
    "qwen3_next": Family(
        attention="2D", gate="whole", mixer="delta", defaults={"full_attention_interval": 4, "shared_gate": True}
    ),
    "seed_oss": Family(biases=("attention_bias", "attention_out_bias", "mlp_bias"), defaults={"attention_bias": True}),
    "smollm3": Family(defaults=_TIED),
    "solar_open": Family(),
    "starcoder2": Family("2H 2H", "2H", biases=("use_bias",) * 3, is_gated=False, defaults=_TIED | {"use_bias": True}),
    "vaultgemma": Family(is_scored=True, defaults={**_TIED, "sliding_window_pattern": 2, "capped": True}),
    "youtu": Family(defaults=_TIED),
}
"""model_type of a config.json -> its layers. Other types are counted like Llama, with a note."""

_NOT_COUNTED = {
    "dbrx": "settings in other tables",
    "hrm_text": "layers that are computed several times",
    "jetmoe": "experts in their attention",
    "phi4_multimodal": "parts for images and sound among their language layers",
}
"""model_type -> what is not counted."""
_OTHER_NAMES = {
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    "num_shared_experts": ("n_shared_experts", "moe_num_shared_experts"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    "dense_intermediate_size": ("intermediate_size_mlp",),
    "num_dense_layers": ("first_k_dense_replace", "moe_layer_start_index"),
    "layer_types": ("layers_block_type", "hybrid_override_pattern"),
    "mlp_layer_types": ("moe_layer_freq",),
    "linear_num_heads": ("num_heads",),
}
"""Standard name of a setting -> other names of it."""


def settings_of(config: Mapping[str, Any], name: str) -> tuple[Family, dict[str, Any]]:
    """Return the family of a model, and its settings by their standard names, with what may be left out.

    Args:
        config: contents of a config.json.
        name: of the model, for errors.

    Raises:
        UserError: the model has parts that are not counted.
    """
    inner = config.get("text_config")
    whole = {**config, **inner} if isinstance(inner, Mapping) else config
    kind = str(whole.get("model_type", ""))
    family = FAMILIES.get(kind, Family())
    other = "quantised weights" if whole.get("quantization_config") else _NOT_COUNTED.get(kind)
    if kind not in FAMILIES and has_mixers(config):
        other = "layers with a state"
    if other:
        raise UserError(f"{name}: models of type {kind} have {other}, whose memory is not planned")
    stated = {key: value for key, value in whole.items() if value is not None}
    if "final_logit_softcapping" in whole:
        stated["capped"] = bool(whole["final_logit_softcapping"])
    for key, names in _OTHER_NAMES.items():
        for one in names:
            if one in stated:
                stated.setdefault(key, stated[one])
    return family, {**family.defaults, **stated, "model_type": kind}
