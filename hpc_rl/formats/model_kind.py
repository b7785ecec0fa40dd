"""What the files of a model declare it to be: a language model, or a classifier such as a reward model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.formats.safetensors_header import read_header, shapes
from hpc_rl.system.files import read_json

_HEAD = "score.weight"
"""Name of the head's weight in transformers' sequence classifiers based on decoder models."""
MIXERS = {
    "bailing_hybrid": "BailingHybridDeltaAttention",
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lara_mini": "LaraMiniGatedDeltaNet",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "lfm3": "Lfm3ShortConv",
    "minimax": "MiniMaxLightningAttention",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
}
"""model_type of models that have mixers, layers with a state -> class of these layers in transformers."""
_UNPACKED_4 = (
    *("ctrl", "dbrx", "diffllama", "gpt_bigcode", "granitemoe", "granitemoeshared", "jetmoe", "olmoe", "opt"),
    *("persimmon", "phimoe", "qwen2_moe"),
)
"""model_type of models whose attention packed rows cannot replace in transformers 4, and can in 5."""
_QUANTISED = {
    "config.json": "quantization_config",
    "hf_quant_config.json": "quantization",
    "quantize_config.json": "bits",
    "quant_config.json": "w_bit",
}
"""File of a model folder -> the entry with which transformers, ModelOpt, GPTQ and AWQ state that its weights are
quantised."""
_EXACT = ("F64", "F32", "F16", "BF16")
"""Types of weights that need no scale, as safetensors files name them."""
_KEY_HEADS = "key heads"
VOCABULARY_BLOCK = 64
"""vLLM pads a vocabulary to a multiple of this (DEFAULT_VOCAB_PADDING_SIZE in layers/vocab_parallel_embedding.py)."""
_REMEDIES = {
    "reward.model": "set reward.weights to one number for each output, or leave it out if there is one",
    "model.path": "name one column in data.label_keys for each output, or start from the language model",
    "critic.path": "name a language model, a critic, or a reward model with one output",
}
"""Option -> what to do if the model has another number of outputs."""


def is_classifier(architectures: Sequence[str] | None) -> bool:
    """Return whether the `architectures` of a config.json name a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in architectures or ())


def is_language_model(architectures: Sequence[str] | None) -> bool:
    """Return whether the `architectures` of a config.json name a language model."""
    endings = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
    return any(name.endswith(endings) for name in architectures or ())


def architectures_of(folder: Path) -> list[str]:
    """Return the `architectures` of a model folder; empty if it declares none."""
    found = read_json(folder / "config.json", named=True).get("architectures")
    return [str(name) for name in found] if isinstance(found, list) else []


def outputs_of(files: Iterable[Path]) -> int | None:
    """Return the number of outputs of a classifier's head; None if the files have no such head, or cannot be read.

    Args:
        files: safetensors files of the model.
    """
    for file in files:
        try:
            found = shapes(file).get(_HEAD)
        except (OSError, ValueError):
            return None
        if found:
            return found[0]
    return None


def refuse_other_outputs(key: str, path: str, files: Iterable[Path], needed: int) -> None:
    """Raise UserError if a classifier has another number of outputs than is needed.

    Args:
        key: the option that names `path`, for the error.
        files: safetensors files of the model.
    """
    found = outputs_of(files)
    if found not in (None, needed):
        raise UserError(f"{key} {path} has {counted(found, 'output')}, not {needed}: {_REMEDIES[key]}")


def refuse_quantised(
    key: str, path: str, find: Callable[[str], Path | None], weights: Callable[[], Iterable[Path]]
) -> None:
    """Raise UserError if the weights of a model are quantised: without their scales they are other weights.

    Args:
        key: the option that names `path`, for the error.
        find: returns a file of the model by its name, or None.
        weights: returns the safetensors files of the model.
    """
    found = None
    for name, entry in _QUANTISED.items():
        file = find(name)
        if file is not None and (value := read_json(file, named=True).get(entry)) is not None:
            how = [value.get(part) for part in ("quant_method", "quant_algo")] if isinstance(value, dict) else []
            found = f"{name} has {entry}" + "".join(f" ({part})" for part in how if part)
            break
    for file in () if found else weights():
        with suppress(OSError, ValueError):  # loading the weights explains it
            for name, entry in read_header(file)[0].items():
                if name.endswith("weight") and len(entry["shape"]) > 1 and entry["dtype"] not in _EXACT:
                    found = f"{name} has the type {entry['dtype']}"
    if found is not None:
        raise UserError(
            f"{key} {path} has quantised weights, which cannot be trained: {found}; name the model from which it was "
            "made, or a copy that was converted to bfloat16"
        )


def refuse_transformers_4(key: str, path: str, settings: Mapping[str, Any], version: str, packing: bool = True) -> None:
    """Raise UserError if transformers 4 is installed, and cannot compute a model in packed rows, or computes another.

    Args:
        key: the option that names `path`, for the error.
        settings: of the model, as in its config.json.
        version: of transformers; empty if it is not known.
        packing: trainer.packing.
    """
    inner, problem, remedy = text_settings(settings), "", "install transformers 5"
    kind = inner.get("model_type")
    if inner is not settings:
        problem = "does not load the language model alone of a model with parts for images or sound"
    elif kind in ("bamba", "falcon_h1", "granitemoehybrid", "jamba"):
        problem = f"gives attention a mask of its own in models of type {kind}"
    elif inner.get("rope_parameters"):
        problem = "does not read the rotary embedding that transformers 5 has saved (rope_parameters in config.json)"
    elif packing and kind in _UNPACKED_4:
        problem = f"has no attention that packed rows can replace in models of type {kind}"
        remedy += ", or use trainer.packing=false"
    if problem and version.startswith("4."):
        raise UserError(f"{key} {path} cannot be trained with transformers {version}, which {problem}: {remedy}")


def refuse_other_frequencies(key: str, path: str, settings: Mapping[str, Any], engine: str, room: int) -> None:
    """Raise UserError if the rotary embedding of a model in an engine is not the one with which it is trained.

    SGLang takes the largest position of a batch of requests for `longrope`, and the largest length that `dynamic` can
    reach for all requests; vLLM does not scale `dynamic` (both in layers/rotary_embedding).

    Args:
        key: the option that names `path`, for the error.
        settings: of the model, as in its config.json.
        engine: rollout.name.
        room: most tokens of a prompt and its response.
    """
    settings, limit = text_settings(settings), unscaled_positions(settings)
    for table in _rotary_tables(settings):
        kind = table.get("rope_type", table.get("type"))
        is_dynamic = kind == "dynamic" and "alpha" not in table  # which is another type
        is_other = {"vllm": is_dynamic and room > limit, "sglang": is_dynamic or (kind == "longrope" and room > limit)}
        if is_other.get(engine):
            remedies = ["set rollout.name=vllm"] if engine == "sglang" else []
            if room > limit:
                remedies.append(
                    "lower data.max_prompt_length + data.max_response_length (or max_model_len in "
                    f"rollout.engine_kwargs) to at most {limit:,}"
                )
            raise UserError(
                f"rollout.name={engine} does not compute the rotary embedding of {key} {path} (type {kind}) as "
                f"training does, with up to {room:,} tokens of prompt and response: "
                + (", and " if is_dynamic else ", or ").join(remedies)
            )


def refuse_unsplittable_engine(key: str, path: str, settings: Mapping[str, Any], size: int) -> None:
    """Raise UserError if vLLM cannot split a model over the GPUs of an engine.

    Args:
        key: the option that names `path`, for the error.
        settings: of the model, as in its config.json.
        size: rollout.tensor_parallel_size.
    """
    parts = dict(_parts_of_engine(text_settings(settings)))
    if odd := [f"{number:,} {name}" for name, number in parts.items() if not _splits(name, number, size)]:
        sizes = range(1, max(size, 8) + 1)
        fitting = [each for each in sizes if all(_splits(name, number, each) for name, number in parts.items())]
        raise UserError(
            f"rollout.tensor_parallel_size={size} does not divide the {' and the '.join(odd)} of {key} {path}: use one "
            f"of {', '.join(map(str, fitting))}"
        )


def _parts_of_engine(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield what vLLM divides among the GPUs of an engine, with its number.

    Sources: `verify_with_parallel_config` in vllm/config/model.py, and the assertions on tp_size in
    vllm/model_executor: layers/linear.py, layers/vocab_parallel_embedding.py, layers/fused_moe/config.py.
    """
    names = {"query heads": "num_attention_heads"}
    if "kv_lora_rank" not in settings:  # multi-head latent attention gives every GPU all keys
        names[_KEY_HEADS] = "num_key_value_heads"
    dense_layers = ("mlp_only_layers", "first_k_dense_replace")
    has_dense = any(settings.get(key) for key in dense_layers) or settings.get("decoder_sparse_step", 1) != 1
    if has_dense or "moe_intermediate_size" not in settings:
        names["inner dimensions of an MLP"] = "intermediate_size"
    names["inner dimensions of an expert"] = "moe_intermediate_size"
    names["inner dimensions of the shared expert"] = "shared_expert_intermediate_size"
    for name, key in names.items():
        number = settings.get(key)
        if isinstance(number, int) and number > 0:
            yield name, number
    vocabulary = settings.get("vocab_size")
    if isinstance(vocabulary, int):
        yield "padded rows of the vocabulary", -(-vocabulary // VOCABULARY_BLOCK) * VOCABULARY_BLOCK


def _splits(name: str, number: int, size: int) -> bool:
    """Return whether GPUs can share a part of a model. If there are fewer key heads than GPUs, key heads are copied."""
    return number % size == 0 or (name == _KEY_HEADS and size % number == 0)


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the language model in a model that reads images too."""
    inner = settings.get("text_config")
    return inner if isinstance(inner, Mapping) else settings


def has_mixers(settings: Mapping[str, Any]) -> bool:
    """Return whether a model has layers with a state. Models of such a type may have attention only (Granite 4).

    Args:
        settings: of the model, as in its config.json.
    """
    settings = text_settings(settings)
    kinds = settings.get("layer_types") or ["unknown"]
    return settings.get("model_type") in MIXERS and not set(kinds) <= {"attention", "full_attention"}


def unscaled_positions(settings: Mapping[str, Any]) -> int:
    """Return the length up to which rotary embeddings of the types `dynamic` and `longrope` do not depend on the length
    of a sample; 0 if the settings do not show it.

    Args:
        settings: of the model, as in its config.json.
    """
    settings = text_settings(settings)
    names = ("max_position_embeddings", "original_max_position_embeddings")
    found = (table.get(name) for table in (settings, *_rotary_tables(settings)) for name in names)
    return min((int(number) for number in found if number is not None), default=0)


def _rotary_tables(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of a model's rotary embeddings, of which it may have one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(found := settings.get(name), Mapping):
            yield from (found, *(one for one in found.values() if isinstance(one, Mapping)))
