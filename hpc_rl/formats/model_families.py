"""Families of models that training cannot compute, or only unpacked, by model_type and settings of a config.json.

A model is refused before its job is queued, and by the same function when it is loaded, with the defaults of its family
filled in. Types that are not named here get no verdict: they are tried when they are loaded (packed_check.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import has_mixers, text_settings


class FamilyRefusal(NamedTuple):
    """Why models are refused, and what to do."""

    reason: str
    """What "models of type X" do or are."""
    remedy: str
    families: frozenset[str] = frozenset()
    """model_type of all models for which this holds, whatever their settings are."""
    of_head: bool = False
    """Whether only their LM head is the reason, so that critics and reward models of these families are not refused."""
    of_rows: bool = False
    """Whether only packed rows are the reason, so that trainer.packing=false trains these models."""
    of_scores: bool = False
    """Whether only critics and reward models of these families are refused."""


def _types(names: str) -> frozenset[str]:
    return frozenset(names.split())


UNPACK = "use trainer.packing=false: one sample per row, 2 to 7 times slower when samples are short"
"""What to do about a model of which only packed rows would be wrong."""
_DECODERS = "use a decoder of a newer family, such as llama, olmo2, qwen3 or gemma3_text"
_FULL = "use a model whose tokens attend to all tokens before, or to a window of them"

REFUSALS = {
    "state": FamilyRefusal(
        "have layers with a state that packed rows cannot divide into samples",
        "use a family with such layers that is supported: bamba, granitemoehybrid, nemotron_h, qwen3_5 or qwen3_next",
        _types("falcon_mamba mamba mamba2 recurrent_gemma rwkv xlstm zamba zamba2 zaya"),
        of_rows=True,
    ),
    "keys": FamilyRefusal(
        "attend to selected or compressed keys, and packed training computes attention to all of them",
        "use a model with full attention, such as deepseek_v3, glm4_moe or qwen3_moe",
        _types("axk2 deepseek_v32 deepseek_v4 glm_moe_dsa hy_v4"),
        of_rows=True,
    ),
    "mask": FamilyRefusal(
        "need a mask of their own in attention, which depends on the tokens", _DECODERS, _types("doge"), of_rows=True
    ),
    "code": FamilyRefusal(
        "have attention, positions or hidden states that packed training cannot replace in the code of transformers",
        _DECODERS,
        _types(
            "biogpt bloom codegen falcon git gpt_neo gpt_neox_japanese gptj inkling_text moshi mpt nemotron openai-gpt "
            "qwen4_exp_text reformer stablelm xglm"
        ),
        of_rows=True,
    ),
    "encoder": FamilyRefusal(
        "attend to later tokens, as encoders do, and do not predict the next token",
        _DECODERS,
        _types(
            "albert bert bert-generation big_bird camembert cpmant data2vec-text deberta deberta-v2 distilbert electra "
            "ernie megatron-bert modernbert rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta "
            "xlm-roberta-xl xlnet xmod"
        ),
    ),
    "encoder-decoder": FamilyRefusal(
        "have an encoder and a decoder, and training computes decoders only",
        _DECODERS,
        _types(
            "bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5 mvp pegasus "
            "pegasus_x plbart prophetnet t5 t5gemma trocr umt5 whisper"
        ),
    ),
    "head": FamilyRefusal(
        "have no plain LM head, which the chunked loss needs",
        "use a model of another family, such as phi3, llama or qwen3",
        _types("modernbert-decoder"),
        of_head=True,
    ),
    "prefix": FamilyRefusal(
        "attend to later tokens of the prompt too, and training computes attention to earlier tokens only",
        "use another model with parts for images, such as gemma3, qwen3_5 or mistral3",
        _types("paligemma"),
    ),
    "images": FamilyRefusal(
        "have layers inside of their language model that read images, which text alone does not train",
        "use a model that reads images as tokens, such as gemma3, qwen3_5 or mistral3",
        _types("idefics mllama"),
    ),
    "scale": FamilyRefusal(
        "scale their logits (logit_scale) in vLLM, but not in transformers",
        "use the language model alone (cohere2), or another model with parts for images, such as gemma3 or qwen3_5",
        _types("aya_vision cohere2_vision"),
    ),
    "scores": FamilyRefusal(
        "have no sequence classifier in transformers, which critics and reward models need",
        "use a model of another family, such as qwen3, llama or gemma3; GRPO needs no critic",
        _types(
            "afmoe apertus apertus1p5_text aria_text bailing_hybrid bamba beam bitnet blt codegen cohere cohere2 "
            "cohere2_moe cwm dbrx deepseek_v32 deepseek_v4 dory dots1 dots3_note_text ernie4_5 ernie4_5_moe exaone "
            "exaone_moe falcon_h1 falcon_mamba flex_olmo flint gemma3n_text gemma4_text gemma4_unified_text git "
            "glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm_moe_dsa gpt_neox_japanese granite granite_swa "
            "granitemoe granitemoe_swa granitemoehybrid granitemoeshared hrm_text hy_v3 hy_v4 hyperclovax "
            "inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder jais2 kimi_linear kolibri1 laguna "
            "lara_mini lfm2 lfm2_moe lfm3 llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash minimax_m2 "
            "minimax_m3_vl_text moshi nanochat nemotron_h olmo_hybrid olmoe qwen2_5_vl_text qwen2_vl_text "
            "qwen3_5_moe_text qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text recurrent_gemma rwkv sarvam_mla "
            "sarvam_moe solar_open vaultgemma xglm xlstm youtu zaya"
        ),
        of_scores=True,
    ),
}
"""The reasons for which whole families are refused; docs/models.md has a row for each."""

_UNSERVED = {
    "vllm": (
        FamilyRefusal(
            "have layers with a state for which the admitted versions of vLLM have no code",
            "set rollout.name=hf, or use falcon_h1, granitemoehybrid, nemotron_h or qwen3_next",
            _types("bamba minimax"),
        ),
        FamilyRefusal(
            "normalise states before their gate (mamba_norm_before_gate), and vLLM would do so after it",
            "set rollout.name=hf, or use a model with mamba_norm_before_gate=false, as the published ones have",
            _types("falcon_h1"),
        ),
        FamilyRefusal(
            "have embeddings of each layer, which vLLM leaves out if there are no images",
            "set rollout.name=hf, or use gemma3_text or gemma4_text",
            _types("gemma3n_text"),
        ),
    )
}
"""rollout.name -> families that training computes, and that this engine cannot load or computes differently."""
_CAPPED = (
    *("beam", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "nanochat"),
    "vaultgemma",
)
"""model_type of models that cap their logits. Others may have the setting without using it."""
_WINDOWS_IN_MASKS = ("phimoe", "qwen2_moe")
"""model_type of models that do not pass their windows of attention to the attention function."""
_LAYERS = {"attention", "full_attention", "sliding_attention", "mlp"}
"""Types of layers that packed training computes, besides layers with a state. Files of Dory list MLPs too."""


def refuse_family(
    key: str, path: str, settings: Mapping[str, Any], with_head: bool = True, packing: bool = True
) -> None:
    """Raise UserError if training cannot compute a model.

    Args:
        key: the option that names `path`, for the error.
        settings: of the model, as in its config.json.
        with_head: whether its LM head is used, and not a head for scores.
        packing: trainer.packing.
    """
    inner = text_settings(settings)
    kinds = [str(each["model_type"]) for each in (inner, settings) if each.get("model_type")]
    whole = ((kind, each) for kind in kinds for each in REFUSALS.values() if kind in each.families)
    of_settings = ((kind, each) for kind in kinds[:1] for each in _of_settings(kind, inner))
    for kind, found in (*whole, *of_settings):
        of_others = found.of_scores if with_head else found.of_head or (found.of_scores and "auto_map" in settings)
        if not of_others and (packing or not found.of_rows):
            how, remedy = ("in packed rows", f"{UNPACK}; or {found.remedy}") if found.of_rows else ("", found.remedy)
            what = f"{key} {path} cannot be trained {how}".rstrip()
            raise UserError(f"{what}: models of type {kind} {found.reason}: {remedy}")


def refuse_unserved(key: str, path: str, settings: Mapping[str, Any], engine: str) -> None:
    """Raise UserError if a rollout engine cannot compute models of this family.

    Args:
        key: the option that names `path`, for the error.
        settings: of the model, as in its config.json.
        engine: rollout.name.
    """
    settings = text_settings(settings)
    kind = settings.get("model_type")
    for found in _UNSERVED.get(engine, ()):
        gate_first = settings.get("mamba_rms_norm") and settings.get("mamba_norm_before_gate", True)
        if kind in found.families and (kind != "falcon_h1" or gate_first):
            what = f"rollout.name={engine} cannot compute {key} {path}"
            raise UserError(f"{what}: models of type {kind} {found.reason}: {found.remedy}")


def _of_settings(family: str, settings: Mapping[str, Any]) -> Iterator[FamilyRefusal]:
    """Yield why a model with these settings is refused, although others of its family may not be."""
    other = set() if has_mixers(settings) else set(settings.get("layer_types") or ()) - _LAYERS
    if other:
        yield FamilyRefusal(
            f"have layers of type {', '.join(sorted(other))}, which packed training does not support",
            _FULL,
            of_rows=True,
        )
    window, use = settings.get("sliding_window"), settings.get("use_sliding_window", family != "qwen2_moe")
    if family in _WINDOWS_IN_MASKS and window and use and window < settings.get("max_position_embeddings", 0):
        yield FamilyRefusal(
            f"use sliding-window attention (sliding_window={window}), but do not pass the window to a custom attention "
            "function, which packing needs",
            "use a model without windows, or of another family, such as qwen3_moe or mixtral",
            of_rows=True,
        )
    if settings.get("attn_temperature_tuning", family == "llama4_text"):
        yield FamilyRefusal(
            "scale queries by their position in the row instead of the sample (attn_temperature_tuning), which packed "
            "training does not support",
            "use another family, such as llama or qwen3_moe",
            of_rows=True,
        )
    if (cap := settings.get("final_logit_softcapping")) is not None and family not in _CAPPED:
        yield FamilyRefusal(
            f"have final_logit_softcapping={cap}, which is supported only for {', '.join(_CAPPED)}",
            "remove it from config.json if the model was trained without it, or use another model",
            of_head=True,
        )
