"""The counts of parameters against the models that transformers builds, and errors for other models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hpc_rl.config.training.common import LoraConfig
from hpc_rl.errors import UserError
from hpc_rl.plan import families as plan_families
from hpc_rl.plan.memory import adapter_parameters
from hpc_rl.plan.shape import Shape, shape_of
from hpc_rl.training.models.lora import block_linears
from tests.marks import since_5
from tests.plan.families import PUBLISHED, VARIANTS

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
FAMILIES = [
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("Mistral", {}),
    ("Qwen2", {}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", {"head_dim": 64}),
    ("Gemma", {"head_dim": 64}),
    ("Olmo2", {}),
    ("Mixtral", {"num_local_experts": 4}),
    ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 128, "decoder_sparse_step": 2}),
    ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [1], "head_dim": 64}),
    (
        "Glm4Moe",
        {"n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 96, "first_k_dense_replace": 2},
    ),
    ("Gemma2", {"head_dim": 64}),
    ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}),
]


OFTEN = {"deepseek_v3", "gemma4_text", "jamba", "kimi_linear", "nemotron_h", "qwen3_next"}
"""Families that every run of the tests counts."""


def config_of(family: str, **settings: Any) -> Any:
    """Return a configuration of transformers."""
    return getattr(transformers, f"{family}Config")(**{**SIZES, **settings})


def count(auto: str, config: Any) -> int:
    """Return the parameters of a model that transformers builds."""
    with torch.device("meta"):
        return sum(p.numel() for p in getattr(transformers, auto).from_config(config).parameters())


@pytest.mark.parametrize(("family", "settings"), FAMILIES)
@pytest.mark.parametrize("form", ["to_dict", "to_diff_dict"])
def test_parameters(family: str, settings: dict[str, Any], form: str) -> None:
    """A config.json may leave out what is the family's default."""
    config = config_of(family, **settings)
    assert shape_of(getattr(config, form)(), "m").total == count("AutoModelForCausalLM", config)


@pytest.mark.parametrize(("family", "settings"), FAMILIES)
def test_linear_layers(family: str, settings: dict[str, Any]) -> None:
    """Those that get adapters, and whose weights may be in 4 bits, also in layers with a usual MLP among experts."""
    config = config_of(family, **settings)
    if {"num_experts", "num_local_experts", "n_routed_experts"} & settings.keys():
        pytest.importorskip("transformers.conversion_mapping", reason="experts were separate layers before it")
    with torch.device("meta"):
        built = block_linears(transformers.AutoModelForCausalLM.from_config(config)).values()
    shape = shape_of(config.to_dict(), "m")
    found = [(rows, columns) for layer in shape.layers for _, rows, columns in layer.linears]
    assert sorted(found) == sorted((m.out_features, m.in_features) for m in built)
    adapters = 8 * sum(m.out_features + m.in_features for m in built)
    assert adapter_parameters(shape, LoraConfig(rank=8)) == adapters


COUNTED = [pytest.param(kind, marks=[] if kind in OFTEN else [pytest.mark.long]) for kind in plan_families.FAMILIES]


@pytest.mark.parametrize("kind", COUNTED)
def test_parameters_of_each_family(kind: str) -> None:
    """With the settings that transformers has as defaults: often those of a published model."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    for more in VARIANTS.get(kind) or [{}]:
        config = transformers.AutoConfig.for_model(kind, **more)
        whole = count("AutoModelForCausalLM", config.get_text_config())
        assert [shape_of(form, "m").total for form in (config.to_dict(), config.to_diff_dict())] == [whole] * 2, more


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[] if k in OFTEN else [pytest.mark.long]) for k in PUBLISHED])
def test_parameters_from_published_settings(kind: str) -> None:
    """As files name them that are older than this transformers."""
    settings = PUBLISHED[kind]
    if settings["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    config = transformers.AutoConfig.for_model(**settings)
    assert shape_of(settings, "m").total == count("AutoModelForCausalLM", config)


@since_5
def test_the_language_part_of_a_model_for_images() -> None:
    """Neither loaded nor counted: the rest."""
    config = transformers.AutoConfig.for_model("qwen3_5")
    language = count("AutoModelForCausalLM", config.get_text_config())
    assert shape_of(config.to_dict(), "m").total == language


def test_parameters_of_a_classifier() -> None:
    config = config_of("Qwen2", tie_word_embeddings=True, num_labels=1)
    shape = shape_of(config.to_dict(), "m")
    assert shape.total_as_classifier == count("AutoModelForSequenceClassification", config)


def test_active_parameters_of_a_mixture() -> None:
    """A token uses 2 of 6 experts: 4 x 3 matrices of 256 x 96 in each of three layers are idle."""
    shape = shape_of(config_of("Qwen3Moe", **EXPERTS).to_dict(), "m")
    idle = 3 * 4 * 3 * 256 * 96
    assert shape.active == shape.total - idle - 1000 * 256 - 256
    assert shape.largest.working_inner == 2 * 96
    assert shape.largest.in_linears == 2 * 256 * (256 + 64)


def test_active_parameters_of_experts_with_biases() -> None:
    config = config_of("GptOss", num_local_experts=4, num_experts_per_tok=1, head_dim=64)
    shape = shape_of(config.to_dict(), "m")
    idle = 3 * 3 * (3 * 256 * 384 + 2 * 384 + 256)
    assert shape.active == shape.total - idle - 1000 * 256 - 256
    assert shape_of(config_of("Gemma2").to_diff_dict(), "m").has_cap
    assert not shape_of(config_of("Gemma2", final_logit_softcapping=None).to_dict(), "m").has_cap
    assert shape.has_scores and not shape_of(config_of("Qwen3Moe", **EXPERTS).to_dict(), "m").has_scores
    assert shape_of(config_of("Qwen3Moe", attention_dropout=0.1, **EXPERTS).to_dict(), "m").has_scores


def test_sizes_of_attention() -> None:
    shape = shape_of(config_of("Qwen3", head_dim=64).to_dict(), "m")
    (attention,) = set(shape.attentions)
    assert (attention.queries, attention.keys, attention.cached) == (512, 128, 256)
    assert shape.largest.in_linears == shape.largest.parameters - shape.largest.vectors


@pytest.mark.parametrize(("family", "expected"), [("qwen3", True), ("olmo2", True), ("llama", False)])
def test_norms_of_queries_and_keys(family: str, expected: bool) -> None:
    assert shape_of({"model_type": family, **SIZES}, "/model").attentions[0].is_normed is expected


def test_text_model_of_a_larger_one() -> None:
    config = {"model_type": "mistral3", "text_config": {**SIZES, "model_type": "mistral"}}
    assert shape_of(config, "m").total == count("AutoModelForCausalLM", config_of("Mistral"))


def test_unknown_family_is_counted_with_a_note() -> None:
    (note,) = shape_of({**SIZES, "model_type": "new"}, "m").notes
    assert note == "m is of type new, which is counted like Llama"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sliding_window": 4096}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"sliding_window": None}, False),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"], "sliding_window": 4096}, True),
        ({"layer_types": ["full_attention"] * 3, "sliding_window": 4096}, False),
    ],
)
def test_windows_of_attention(settings: dict[str, Any], expected: bool) -> None:
    windows = {one.window for one in shape_of({**SIZES, **settings}, "m").attentions}
    assert bool(windows - {None}) is expected


@pytest.mark.parametrize(
    "odd",
    [
        {"num_key_value_heads": None, "head_dim": None},
        {"num_key_value_heads": "2", "head_dim": 0},
        {"num_experts": None, "num_local_experts": "8"},
        {"mlp_only_layers": 3, "decoder_sparse_step": 0},
    ],
)
def test_odd_values_count_as_missing(odd: dict[str, Any]) -> None:
    plain = {key: value for key, value in SIZES.items() if key not in odd}
    assert shape_of({**plain, **odd}, "m") == shape_of(plain, "m")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**SIZES, "num_attention_heads": 300}, "m: its config.json has 300 attention heads for a hidden size of 256"),
        ({"model_type": "new", "d_model": 768}, "m: its config.json has no hidden_size and no num_hidden_layers"),
        ({**SIZES, "hidden_size": "256"}, "has no hidden_size, so"),
        ({**SIZES, "model_type": "jetmoe"}, "m: models of type jetmoe have experts in their attention, whose memory"),
        *(
            ({**SIZES, "model_type": kind}, f"m: models of type {kind} have layers with a state, whose memory")
            for kind in ("bailing_hybrid", "lara_mini", "lfm3")
        ),
        ({**SIZES, "model_type": "llama", "quantization_config": {"bits": 4}}, "have quantised weights"),
    ],
)
def test_other_models_are_refused(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        shape_of(config, "m")


def test_settings_of_layers_may_be_a_list() -> None:
    config = {**SIZES, "model_type": "llama", "num_hidden_layers": 3}
    expected = shape_of({**config, "per_layer_config": {"1": {"intermediate_size": 64}}}, "m")
    assert shape_of({**config, "per_layer_config": [None, {"intermediate_size": 64}, {}]}, "m") == expected
    assert expected != shape_of(config, "m")


def test_rows_that_ranks_can_share() -> None:
    def of(**more: object) -> Shape:
        sizes = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 6}
        return shape_of({"model_type": "llama", "vocab_size": 100, **sizes, **more}, "m")

    assert [of().may_be_split(size) for size in (1, 2, 3, 4)] == [True, True, True, False]
    states = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    stateful = of(model_type="qwen3_5_text", linear_value_head_dim=8, **states)
    assert [stateful.may_be_split(size) for size in (1, 2, 3)] == [True, False, False]


def test_a_new_type_of_models_is_counted_like_llama_whatever_its_settings_are() -> None:
    more: dict[str, Any] = {"full_attention_interval": 4, "attn_type_list": [0, 1], "intermediate_size": [64]}
    shape = shape_of({**SIZES, "model_type": "new", **more}, "m")
    assert all(layer.mixer is None for layer in shape.layers)
    assert shape.notes
