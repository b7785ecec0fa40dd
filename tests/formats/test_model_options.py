"""Options that some models do not have are refused by their config.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.formats.model_options import (
    OPTIONS,
    has_experts,
    refuse_option,
    refuse_unsplittable,
    refuse_without_liger,
)

LLAMA = {"model_type": "llama", "hidden_act": "silu", "mlp_bias": False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "gemma2"}, r"is of type gemma2, which model\.use_liger=true does not support \(exaone4, "),
        (
            {"partial_rotary_factor": 0.75},
            r"rotates 0\.75 of each head \(partial_rotary_factor\), and model\.use_liger",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"rotates 0\.5 of each head"),
        (
            {"hidden_act": "relu"},
            r"has the activation relu \(hidden_act\), and model\.use_liger=true would compute silu",
        ),
        ({"mlp_bias": True}, r"has biases in its MLPs \(mlp_bias\), which model\.use_liger=true would leave out"),
    ],
)
def test_models_that_ligers_kernels_would_change_are_refused(settings: dict[str, Any], message: str) -> None:
    for given in ({**LLAMA, **settings}, {"text_config": {**LLAMA, **settings}}):
        with pytest.raises(UserError, match=rf"^model\.path /m {message}.*: remove model\.use_liger, or use another"):
            refuse_without_liger("model.path", "/m", given)


def test_models_that_ligers_kernels_compute_are_accepted() -> None:
    refuse_without_liger("model.path", "/m", LLAMA)
    rotary = {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4}, "rope_scaling": None}
    refuse_without_liger("model.path", "/m", {"model_type": "phi3", "partial_rotary_factor": 1.0, **rotary})
    refuse_without_liger("model.path", "/m", {**LLAMA, "hidden_act": "swish"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_attention_heads": 12},
            "trainer.sequence_parallel=8 does not divide the 12 query heads of model.path /m: use one of 1, 2, 3, 4, 6,"
            " 12",
        ),
        ({"text_config": {"num_attention_heads": 6}}, "does not divide the 6 query heads"),
        ({"n_head": 12}, "does not divide the 12 query heads"),
        ({"num_attention_heads_per_layer": [16, 20]}, "does not divide the 20 query heads"),
        (
            {"model_type": "qwen3_next"},
            "with model.path /m: models of type qwen3_next have layers with a state, which need whole",
        ),
        ({"text_config": {"model_type": "qwen3_5_text"}}, "have layers with a state"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, "have layers with a state"),
    ],
)
def test_models_that_ranks_cannot_share(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse_unsplittable("model.path", "/m", {"num_attention_heads": 16, **settings}, 8)
    assert message in str(caught.value)


def test_models_that_ranks_can_share() -> None:
    refuse_unsplittable("model.path", "/m", {"num_attention_heads": 16}, 8)
    refuse_unsplittable("model.path", "/m", {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2}, 8)
    refuse_unsplittable("model.path", "/m", {}, 8)
    refuse_unsplittable("model.path", "/m", {"num_attention_heads": 7}, 1)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "adapters",
            {"model_type": "gpt2"},
            "model.lora cannot be used with model.path /m: models of type gpt2 have no",
        ),
        ("4 bits", {"model_type": "mixtral", "num_local_experts": 8}, "models of type mixtral have experts"),
        ("4 bits", {"text_config": {"model_type": "qwen3_5_moe_text", "num_experts": 4}}, "qwen3_5_moe_text have exp"),
        ("recomputation", {"model_type": "jetmoe"}, "remove model.enable_gradient_checkpointing"),
        ("adapters in engines", {"model_type": "kimi_linear"}, "cannot have adapters in vLLM: use rollout.merge_lora="),
    ],
)
def test_options_that_a_model_does_not_have(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        refuse_option("model.path", "/m", settings, name)
    for each in OPTIONS:
        refuse_option("model.path", "/m", {**LLAMA, "num_experts": None}, each)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"num_local_experts": 0}, False),
        ({"num_experts": 1}, False),
        ({"num_experts": 4, "enable_moe_block": False}, False),
        ({"num_experts": 4, "enable_moe_block": True}, True),
        ({"n_routed_experts": 64}, True),
        ({"ffn_config": {"moe_num_experts": 16}}, True),
    ],
)
def test_models_with_experts(settings: dict[str, Any], expected: bool) -> None:
    assert has_experts(settings) == has_experts({"text_config": settings}) == expected


def test_the_page_about_models_names_the_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    section = page.partition("\n## Options that some models do not have\n")[2].partition("\n## ")[0]
    for each in OPTIONS.values():
        assert f"| `{each.option}" in section, each.option


def test_models_without_adapters_in_vllm() -> None:
    registry = pytest.importorskip("vllm.model_executor.models.registry", reason="vLLM is not installed")
    interfaces = pytest.importorskip("vllm.model_executor.models.interfaces")
    names = pytest.importorskip("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    refused = {kind for kind in names if OPTIONS["adapters in engines"].holds({"model_type": kind})}
    for kind in refused | {"llama", "qwen3_next", "lfm2", "mixtral"}:
        model = registry.ModelRegistry.models[names[kind]].load_model_cls()
        assert interfaces.supports_lora(model) == (kind not in refused), kind
