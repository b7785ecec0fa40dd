"""Small models with random weights that have parts for images, in the layout in which such models are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from hpc_rl.probes.tiny_model import make_tokenizer

NONE = object()
SMALL = {
    **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "text_hidden_size": 32},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    **{"first_k_dense_replace": 1, "depth": 1, "embed_dim": 32, "num_heads": 4, "image_size": 28, "patch_size": 14},
    **{"out_hidden_size": 32, "mm_tokens_per_image": 4, "projector_hidden_size": 32, "num_position_embeddings": 16},
    **{"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0], "output_dim": 32, "projection_dim": 32},
    **{"global_head_dim": 8, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 320, "conv_L_cache": 3},
    **{"hidden_size_per_layer_input": 8, "sliding_window": 6, "mm_embed_dim": 32, "position_embedding_size": 64},
}
"""Sizes, of which a part receives those that its configuration has."""
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 1.0},
    "rope_parameters": SECTIONS,
}
IN_SECTIONS = {"rope_parameters": SECTIONS}
WITHOUT_WINDOW = {"sliding_window": NONE}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), DELTA),
    **dict.fromkeys(("gemma3_text", "gemma4_text", "gemma4_unified_text"), WINDOWS),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), IN_SECTIONS),
    **dict.fromkeys(("qwen3_vl_moe_text", "glm4v_text", "glm4v_moe_text"), IN_SECTIONS),
    **dict.fromkeys(("llama", "mistral", "qwen2", "gemma"), WITHOUT_WINDOW),
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
"""model_type -> settings of its own."""
LANGUAGE = ("language_model.", "model.language_model.", "model.text_model.", "lm_head.", "model.layers.", "model.norm.")
LANGUAGE += ("model.embed_tokens.",)


def is_of_language(name: str) -> bool:
    """Whether a weight in a file belongs to the language model."""
    return name.startswith(LANGUAGE)


def make_wrapper(folder: Path, kind: str, predicts_several: bool = False, **settings: Any) -> Path:
    """Save a model of this type with its tokenizer, in two files; parts for images are bfloat16, the rest float32.

    Args:
        predicts_several: whether the files also have a layer that predicts several tokens.
        settings: of the language model.
    """
    default = AutoConfig.for_model(kind)
    parts: dict[str, Any] = {}
    for name, known in type(default).sub_configs.items():
        part = getattr(default, name, None)
        if part is None and name == "vision_config":  # audio stays away
            part = known() if known.__name__ != "AutoConfig" else None
        if part is not None:
            more = settings if name == "text_config" else {}
            parts[name] = {**_small(part, {**OWN.get(part.model_type, {}), **more}), "model_type": part.model_type}
    tokenizer = make_tokenizer(320)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if "text_config" in parts:
        parts["text_config"] |= ends
    own = {name: value for name, value in _small(default, {}).items() if name not in parts}
    config = AutoConfig.for_model(kind, **{**parts, **own, **ends})
    places = [name for name in config.to_dict() if name.endswith(("_token_id", "_token_index")) and name not in ends]
    for number, name in enumerate(sorted(places)):
        setattr(config, name, 300 + number)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    torch.set_rng_state(state)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2e6
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Pretend", "size": kind}))
    weights = load_file(folder / "model.safetensors")
    if predicts_several:
        weights["mtp.fc.weight"] = torch.randn(32, 64)
    (folder / "model.safetensors").unlink()
    _save(folder, {name: w if is_of_language(name) else w.bfloat16() for name, w in weights.items()})
    return folder


def read_files(folder: Path) -> dict[str, torch.Tensor]:
    """All weights in the files of a model."""
    return {name: w for file in sorted(folder.glob("*.safetensors")) for name, w in load_file(file).items()}


def _small(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    known = config.to_dict().keys() | type(config).attribute_map.keys()
    settings = {**{key: value for key, value in SMALL.items() if key in known}, **own}
    return {key: value for key, value in settings.items() if value is not NONE}


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    names, places = list(weights), {}
    for number, half in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: weights[name].contiguous() for name in half}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(half, file)
    total = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
