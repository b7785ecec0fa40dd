"""Options that training cannot compute exactly for some models, or not at all, by what a config.json tells.

Like families (model_families.py), such options are refused before a job is queued, and by the same function when the
model is loaded, with the defaults of its family filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import has_mixers, text_settings


class OptionRefusal(NamedTuple):
    """Why an option is refused for some models, and what to do."""

    option: str
    holds: Callable[[Mapping[str, Any]], bool]
    """Takes the settings of a language model."""
    reason: str
    """What "models of type X" do or are."""
    remedy: str


def _is_of(*families: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda settings: settings.get("model_type") in families


def has_experts(settings: Mapping[str, Any]) -> bool:
    """Return whether some layers of a model are mixtures of experts.

    Args:
        settings: of the model, as in its config.json.
    """
    settings = text_settings(settings)
    counts = [table.get(name) or 0 for table in (settings, settings.get("ffn_config") or {}) for name in _EXPERTS]
    return settings.get("enable_moe_block") is not False and max(counts) > 1


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CONV1D = ("gpt-sw3", "gpt2")
"""model_type of models whose blocks have transposed matrices of transformers' own class Conv1D."""
_WITHOUT_LORA = ("cohere2_moe", "dbrx", "gemma3n_text", "gpt-sw3", "gpt2", "hrm_text", "kimi_linear", "mimo_v2_flash")
"""model_type of models whose class in vLLM 0.32 does not support adapters (SupportsLoRA)."""

OPTIONS = {
    "sequence parallelism": OptionRefusal(
        "trainer.sequence_parallel",
        has_mixers,
        "have layers with a state, which need whole samples and cannot compute a slice",
        "use trainer.sequence_parallel=1, or another model",
    ),
    "adapters": OptionRefusal(
        "model.lora",
        _is_of(*_CONV1D),
        "have no linear layers in their transformer blocks, but layers of transformers' class Conv1D",
        "train all weights, or use another model",
    ),
    "4 bits": OptionRefusal(
        "model.lora.quantize=nf4",
        has_experts,
        "have experts, which are most of their weights and no linear layers, and would keep the type model.dtype",
        "remove model.lora.quantize, or use a model without experts",
    ),
    "adapters in engines": OptionRefusal(
        "rollout.merge_lora=false",
        _is_of(*_WITHOUT_LORA),
        "cannot have adapters in vLLM",
        "use rollout.merge_lora=true",
    ),
    "recomputation": OptionRefusal(
        "model.enable_gradient_checkpointing",
        _is_of("jetmoe"),
        "have no layers that transformers can recompute",
        "remove model.enable_gradient_checkpointing, or use another model",
    ),
}
"""The options that settings of a model decide; docs/models.md has a row for each."""

_LIGER = (
    "exaone4",
    "hunyuan_v1_dense",
    "llama",
    "ministral",
    "mistral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
"""model_type of the dense models for which Liger has all three kernels; `make test-triton` compares each of them."""
_HEADS = ("num_attention_heads", "n_head", "n_heads", "swa_num_attention_heads", "num_attention_heads_per_layer")


def refuse_option(key: str, path: str, settings: Mapping[str, Any], name: str) -> None:
    """Raise UserError if training cannot compute a model with an option.

    Args:
        key: the option that names `path`, for the error.
        settings: of the model, as in its config.json.
        name: of the option in OPTIONS.
    """
    found, settings = OPTIONS[name], text_settings(settings)
    if found.holds(settings):
        raise UserError(
            f"{found.option} cannot be used with {key} {path}: models of type {settings.get('model_type')} "
            f"{found.reason}: {found.remedy}"
        )


def refuse_unsplittable(key: str, path: str, settings: Mapping[str, Any], size: int) -> None:
    """Raise UserError if ranks cannot share the rows of a model.

    Args:
        key: the option that names `path`, for the error.
        settings: of the model, as in its config.json.
        size: trainer.sequence_parallel.
    """
    if size == 1:
        return
    refuse_option(key, path, settings, "sequence parallelism")
    settings = text_settings(settings)
    for name in _HEADS:
        found = settings.get(name) or []
        for heads in sorted(set(found if isinstance(found, list) else [found])):
            if heads % size:
                divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
                raise UserError(
                    f"trainer.sequence_parallel={size} does not divide the {heads} query heads of {key} {path}: use "
                    f"one of {divisors}"
                )


def refuse_without_liger(key: str, path: str, settings: Mapping[str, Any]) -> None:
    """Raise UserError if model.use_liger cannot replace the layers of a model.

    Args:
        key: the option that names `path`, for the error.
        settings: of the model, as in its config.json.
    """
    settings = text_settings(settings)
    family, rotated = settings.get("model_type"), _rotated_part(settings)
    activation = settings.get("hidden_act", "silu")
    problem = None
    if family not in _LIGER:
        problem = f"is of type {family}, which model.use_liger=true does not support ({', '.join(_LIGER)})"
    elif rotated != 1:
        problem = f"rotates {rotated:g} of each head (partial_rotary_factor), and model.use_liger=true would rotate all"
    elif activation not in ("silu", "swish"):
        problem = f"has the activation {activation} (hidden_act), and model.use_liger=true would compute silu"
    elif settings.get("mlp_bias"):
        problem = "has biases in its MLPs (mlp_bias), which model.use_liger=true would leave out"
    if problem is not None:
        raise UserError(f"{key} {path} {problem}: remove model.use_liger, or use another model")


def _rotated_part(settings: Mapping[str, Any]) -> float:
    """Return the part of each attention head that the rotary embedding of a model changes."""
    tables = (settings, settings.get("rope_parameters"), settings.get("rope_scaling"))
    found = (table.get("partial_rotary_factor") for table in tables if isinstance(table, Mapping))
    return min((float(part) for part in found if part is not None), default=1.0)
