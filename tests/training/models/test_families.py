"""What config.json tells about a family is what loading a small model of the family shows, for all of transformers'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.errors import UserError
from hpc_rl.formats import model_families
from hpc_rl.formats.model_families import REFUSALS, refuse_family
from hpc_rl.training.models.causal_lm import causal_lm
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.parallel.distributed import World
from tests.marks import long
from tests.training.models.test_mixers import KINDS as MIXED

pytest.importorskip("transformers.models.olmo_hybrid", reason="older versions have fewer of these models")
WORLD = World(0, 1, torch.device("cpu"))
NONE = object()
SMALL = {
    **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8},
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "vocab_size_per_layer_input": 320,
    },
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
    **{
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_decoder_layers": 2, "first_k_dense_replace": 1},
    **{"depth": 1, "embed_dim": 32, "num_heads": 4, "image_size": 28, "patch_size": 14, "embedding_size": 32},
    **{"lru_width": 32, "attention_window_size": 8, "out_hidden_size": 32, "output_dim": 32},
    "hidden_size_per_layer_input": 8,
}
"""Sizes, of which a family receives those that its configuration has."""
LATENT = {"num_key_value_heads": 4}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {"n_mamba_heads": 8, "mamba_d_state": 8}
ZAMBA2 = {"mamba_ngroups": 1, "mamba_headdim": 8, "num_mem_blocks": 1}
OWN: dict[str, dict[str, Any]] = {
    **{
        kind: {"hidden_size": 64, "num_hidden_layers": given.get("layers", 3), **given} for kind, given in MIXED.items()
    },
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("dots3_note_text", "sarvam_mla"), LATENT),
    **dict.fromkeys(("minicpm3", "youtu"), LATENT),
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 2, "adapter_in_dim": 32, "adapter_out_dim": 32},
    "falcon": {"head_dim": NONE},
    "gemma3n_text": {
        **{"layer_types": TWO_KINDS["layer_types"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
        **{"activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 4},
    },
    "gemma4_text": {**TWO_KINDS, "global_head_dim": 8, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
    "inkling2_loop_text": {"unpadded_vocab_size": 320},
    "inkling2_text": {"unpadded_vocab_size": 320},
    "longcat_flash": {
        **{**LATENT, "num_layers": 2, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "moe_topk": 2},
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8},
    "prophetnet": {"num_hidden_layers": NONE, "num_encoder_layers": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "xlnet": {"max_position_embeddings": NONE, "d_head": 8},
    "xlstm": {"v_head_dim": NONE, "qk_head_dim": NONE},
    "zamba": {**MAMBA, "num_hidden_layers": 3, "layer_types": ["mamba", "hybrid", "mamba"]},
    "zamba2": {**MAMBA, **ZAMBA2, "num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""model_type -> settings that differ, or that are left out."""
UNBUILT = {
    "blt": "is large: its parts have configurations of their own",
    "cohere_compass_text": "needs sections of its rotary embedding",
    "emu3": "is saved as emu3_text_model, which AutoModelForCausalLM does not read",
    "gemma3n": "needs the package timm for its images",
    "gemma4_assistant": "has no class in AutoModel",
    "gemma4_unified_assistant": "has no class in AutoModel",
    "moshi": "can be computed since transformers 5.20 only, and is refused",
    "mllama": "is saved as mllama_text_model, which AutoModelForCausalLM does not read",
    "musicgen": "needs configurations of three models",
    "musicgen_melody": "needs configurations of three models",
}
"""model_type of families that are not tried -> why."""
SHORT = (
    *(
        "bert",
        "deepseek_v32",
        "doge",
        "gemma3",
        "gpt2",
        "llama4",
        "mamba",
        "nanochat",
        "nemotron",
        "opt",
        "phi",
        "qwen3",
    ),
    *("recurrent_gemma", "stablelm", "vaultgemma", "whisper"),
)
KINDS = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in UNBUILT]


def small(config: Any, own: dict[str, Any]) -> dict[str, Any]:
    known = config.to_dict().keys() | type(config).attribute_map.keys()
    settings = {**{key: value for key, value in SMALL.items() if key in known}, **own}
    return {key: value for key, value in settings.items() if value is not NONE and key != "layers"}


def make(folder: Path, kind: str, **more: Any) -> dict[str, Any]:
    """Save a small model with random weights, and return the contents of its config.json."""
    default = AutoConfig.for_model(kind)
    parts = {name: getattr(default, name, None) for name in type(default).sub_configs}
    nested = {
        name: {**small(part, OWN.get(part.model_type, {})), "model_type": part.model_type}
        for name, part in parts.items()
        if part is not None
    }
    config = AutoConfig.for_model(kind, **{**nested, **small(default, {**OWN.get(kind, {}), **more})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) < 8e6
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # so that attention is not uniform
    model.save_pretrained(folder)
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return settings


def verdict(settings: dict[str, Any], with_head: bool = True) -> str | None:
    try:
        refuse_family("model.path", "/m", settings, with_head)
    except UserError as error:
        return str(error)
    return None


def problem_of(folder: Path) -> str | None:
    try:
        load_sharded(causal_lm(ModelConfig(path=str(folder), dtype="float32")), WORLD, TrainingConfig())
    except (UserError, IndexError) as error:
        return repr(error)
    return None


@pytest.mark.parametrize("kind", [kind if kind in SHORT else long(kind) for kind in KINDS])
def test_the_verdict_is_what_loading_shows(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = verdict(make(tmp_path, kind))
    monkeypatch.setattr(model_families, "REFUSALS", {})  # loading has to find out by itself
    problem = problem_of(tmp_path)
    assert (expected is None) == (problem is None), (expected, problem)


def test_the_page_about_models_names_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    section = page.partition("\n## Families that are refused\n")[2].partition("\n## ")[0]
    tried = {kind for kind in KINDS if verdict(AutoConfig.for_model(kind).to_dict()) is None}
    for reason, families in {"yes": tried, **{each.reason: each.families for each in REFUSALS.values()}}.items():
        (row,) = (line for line in section.splitlines() if line.startswith(f"| {reason}"))
        named = set(re.findall("`([^`]+)`", row.split("|")[2]))
        assert (named & set(KINDS) if families is tried else named) == families, reason


def test_families_that_are_not_tried_are_in_transformers() -> None:
    assert UNBUILT.keys() | set(SHORT) <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    named = [family for each in REFUSALS.values() for family in each.families]
    assert len(named) == len(set(named))
    unread = set(named) - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()  # which loading refuses for this reason
    assert all(family in REFUSALS["encoder"].families | REFUSALS["encoder-decoder"].families for family in unread)


@pytest.mark.parametrize(
    ("kind", "settings", "is_refused"),
    [
        ("granitemoehybrid", {"layer_types": ["attention"] * 3}, False),
        ("gemma4_unified_text", {"final_logit_softcapping": 0.5}, False),
        ("modernbert-decoder", {"decoder_bias": False}, True),
        ("qwen2_moe", {"sliding_window": 6, "use_sliding_window": True}, True),
        ("qwen2_moe", {"sliding_window": 6, "use_sliding_window": False}, False),
        ("phimoe", {"sliding_window": 6}, True),
        ("phimoe", {"sliding_window": 64}, False),
        ("llama", {"final_logit_softcapping": 5.0}, True),
    ],
)
def test_settings_decide(tmp_path: Path, kind: str, settings: dict[str, Any], is_refused: bool) -> None:
    assert (verdict(make(tmp_path, kind, **settings)) is not None) == is_refused
    assert (problem_of(tmp_path) is not None) == is_refused
