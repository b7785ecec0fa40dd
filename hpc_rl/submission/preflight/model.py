"""Checks of a model: its folder, its weights, its tokenizer and its chat template."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from hpc_rl.config.groups import path_of_choice
from hpc_rl.config.rl.prompts import PromptConfig
from hpc_rl.config.training.common import ModelConfig, ModelSource
from hpc_rl.config.training.finetune import FinetuneDataConfig
from hpc_rl.data.templates.assistant_text import remarks
from hpc_rl.data.templates.jinja_rendering import (
    added_tokens,
    check_template,
    read_template,
    special_tokens,
    stored_template,
    with_variables,
)
from hpc_rl.errors import UserError
from hpc_rl.formats.large_files import check_model_folder
from hpc_rl.formats.model_kind import (
    architectures_of,
    is_classifier,
    is_language_model,
    refuse_other_outputs,
    refuse_quantised,
)
from hpc_rl.formats.peft_folder import block_layers, matching, read_peft_folder, refuse_other_base
from hpc_rl.formats.safetensors_header import shapes
from hpc_rl.formats.vocabulary import ROLES, other_special_tokens, role_difference, vocabulary_difference
from hpc_rl.submission.hub import HubCache
from hpc_rl.submission.preflight.hub_names import look_up, not_cached, refuse_mistyped
from hpc_rl.submission.series.after import is_coming
from hpc_rl.system.files import read_json

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def check_model_path(
    key: str, path: str, coming: frozenset[Path], cache: HubCache, with_weights: bool = True
) -> str | None:
    """Check that a folder holds a complete Hugging Face model, or that the job can get it from the hub.

    Args:
        coming: what an earlier job writes, which may not exist yet.
        with_weights: whether the job loads the weights.

    Returns:
        Why it could not be checked, if so.

    Raises:
        UserError: the folder is missing or not a complete model, or compute nodes are offline and the cache lacks it.
    """
    if is_coming(path, coming):
        return None
    folder = model_folder(path, cache)
    if folder is None:
        if Path(path).exists():
            raise UserError(f"{key} {path} is a file; give the folder of a Hugging Face model")
        if not _HUB_NAME.fullmatch(path):
            raise UserError(f"{key} {path}: there is no such folder, and this is not the name of a model on the hub")
        if (full := path_of_choice("model", path)) not in (None, path):
            raise UserError(f"{key} {path} is a short name, which only model={path} takes: write {full}")
        if (in_cache := cache.model_folder(path)) is None:
            refuse_mistyped(f"{key} {path}", path, folders_only=True)
        if cache.offline:
            raise UserError(not_cached(f"{key} {path}", path, cache.models, cache.offline))
        return (
            f"model {path} is a name on the hub, and in the cache"
            if in_cache
            else look_up(f"{key} {path}", path, "model", cache)
        )
    try:
        _check_folder(f"{key} {path}", folder, "" if Path(path).is_dir() else f": hpc-rl fetch {path}", with_weights)
    except OSError as error:
        raise UserError(f"{key} {path}: {error.filename or folder} cannot be read: {error.strerror}") from error
    return None


def check_is_language_model(key: str, path: str, cache: HubCache) -> None:
    """Raise UserError if a folder holds a classifier, such as a reward model, of which the LM head would be new."""
    folder = model_folder(path, cache)
    if folder is not None and is_classifier(architectures_of(folder)):
        raise UserError(
            f"{key} {path} is a classifier ({architectures_of(folder)[0]}), such as a reward model, and a language "
            "model is needed: name the model that it was trained from"
        )


def check_is_classifier(key: str, path: str, cache: HubCache) -> None:
    """Raise UserError if a folder holds a language model, which has no head for scores."""
    folder = model_folder(path, cache)
    if folder is not None and is_language_model(architectures_of(folder)):
        raise UserError(
            f"{key} {path} is a language model ({architectures_of(folder)[0]}), and a reward model is needed, a "
            "classifier: train one with hpc-rl submit rm"
        )


def check_outputs(key: str, path: str, needed: int, cache: HubCache) -> None:
    """Raise UserError if the safetensors files in a folder have a head with another number of outputs."""
    folder = model_folder(path, cache)
    if folder is not None:
        refuse_other_outputs(key, path, sorted(folder.glob("*.safetensors")), needed)


def check_config(
    key: str, path: str, cache: HubCache, refuse: Callable[..., None], more: tuple[int | str, ...]
) -> None:
    """Apply a rule about config.json to a model, as far as the file is on this machine.

    Args:
        refuse: takes key, path, contents and `more`, and raises UserError.
    """
    folder = model_folder(path, cache)
    if folder is not None:
        refuse(key, path, read_json(folder / "config.json", named=True), *more)


def check_unquantised(key: str, path: str, cache: HubCache) -> None:
    """Raise UserError if a model's weights are quantised, as far as the files on this machine show it."""
    folder = model_folder(path, cache)
    if folder is not None:
        files = {file.name: file for file in folder.glob("*") if file.is_file()}
        weights = sorted(folder.glob("*.safetensors"))
        refuse_quantised(key, path, files.get, lambda: weights)


def check_adapters(model: ModelConfig, max_rank: int | None, coming: frozenset[Path], cache: HubCache) -> None:
    """Check that the adapters of model.lora fit the model, if its safetensors files are on this machine.

    Args:
        max_rank: largest rank of adapters that engines accept; None if engines get merged weights.
        coming: what an earlier job writes, which may not exist yet.

    Raises:
        UserError: the adapters to continue from are missing, or for another model, or no layer has a wanted name.
    """
    lora, folder = model.lora, model_folder(model.path, cache)
    weights: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        try:
            weights |= shapes(file)
        except (OSError, ValueError):
            return None  # the check of the model reports it
    if lora.path is None:
        if weights:
            matching(lora.target_modules, block_layers(weights), weights)
        return
    key = "model.lora.path"
    if not Path(lora.path).is_dir():
        if not is_coming(lora.path, coming):
            raise UserError(f"{key} {lora.path}: there is no such folder")
        return
    adapters = read_peft_folder(key, Path(lora.path))
    if max_rank is not None and adapters.rank > max_rank:
        raise UserError(
            f"{key} {lora.path} has adapters of rank {adapters.rank}, and engines compute with adapters of rank "
            f"{max_rank} or less (rollout.merge_lora=false): use rollout.merge_lora=true"
        )
    if weights:
        by_layer = {_in_language_model(name): shape for name, shape in weights.items()}
        named = (f"{name}.weight" for name in adapters.modules)
        known = {name: by_layer[own] for name in named if (own := _in_language_model(name)) in by_layer}
        refuse_other_base(key, adapters, model.path, known)


def _in_language_model(name: str) -> str:
    """Return the name of a weight without the beginning that a language model has in a wrapper: adapters have another
    one than some files."""
    return re.sub(r"^(model\.)?((language_model|text_model)\.)?(model\.)?(?=layers\.)", "", name)


def check_same_vocabulary(key: str, path: str, model: ModelSource, cache: HubCache) -> None:
    """Check that two models read token ids as the same tokens, if both have a tokenizer.json on this machine.

    Args:
        key: the option that names `path`, for the error.

    Raises:
        UserError: a token differs; the message names the first one.
    """
    folders = [model_folder(name, cache) for name in (path, model.tokenizer_path or model.path)]
    theirs, ours = (_vocabulary(folder / "tokenizer.json") if folder is not None else {} for folder in folders)
    if not theirs or not ours:
        return
    if (found := vocabulary_difference(theirs, ours)) is not None:
        raise UserError(
            f"{key} {path} and model.path {model.path} have different vocabularies: {found}; choose a model of the "
            "same family"
        )


def check_same_special_tokens(key: str, path: str, model: ModelSource, cache: HubCache) -> None:
    """Check that two tokenizers begin and end texts with the same tokens, if both tokenizer_config.json name them.

    Args:
        key: the option that names `path`, for the error.

    Raises:
        UserError: a special token differs; the message names the first one.
    """
    folders = [model_folder(name, cache) for name in (path, model.tokenizer_path or model.path)]
    files = [folder / "tokenizer_config.json" if folder is not None else None for folder in folders]
    theirs, ours = ({} if file is None else _special_tokens(file) for file in files)
    if (found := role_difference(theirs, ours)) is not None:
        raise UserError(other_special_tokens(key, path, model.path, found))


def _special_tokens(file: Path) -> dict[str, str | None]:
    """Return role -> token of a tokenizer_config.json, without roles that it leaves to the tokenizer's class."""
    found = {role: token for role, token in read_json(file, named=True).items() if role in ROLES and token is not None}
    return {role: token["content"] if isinstance(token, dict) else str(token) for role, token in found.items()}


def _vocabulary(file: Path) -> dict[str, int]:
    """Return token -> number of a tokenizer.json; empty if it has another form."""
    document = read_json(file, named=True)
    found = (document.get("model") or {}).get("vocab")
    if not isinstance(found, dict):
        return {}
    return {**found, **{token["content"]: token["id"] for token in document.get("added_tokens") or ()}}


def _check_folder(what: str, folder: Path, remedy: str, with_weights: bool) -> None:
    if not (folder / "config.json").is_file():
        raise UserError(f"{what} is not a Hugging Face model: it has no config.json")
    check_model_folder(folder)
    if "model_type" not in read_json(folder / "config.json", named=True):
        raise UserError(f"{what} is not a Hugging Face model: its config.json has no model_type")
    if not with_weights:
        return
    weights = {file.name for kind in ("safetensors", "bin") for file in folder.glob(f"*.{kind}") if file.is_file()}
    if not weights:
        raise UserError(f"{what} has no weights (*.safetensors or *.bin){remedy}")
    named = read_json(folder / "model.safetensors.index.json", named=True).get("weight_map")
    missing = sorted({str(name) for name in named.values()} - weights) if isinstance(named, dict) else []
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{what} is incomplete: {missing[0]}{more} missing in {folder}{remedy}")


def check_chat_template(model: ModelSource, data: FinetuneDataConfig | PromptConfig, cache: HubCache) -> str | None:
    """Check that there is a tokenizer with a chat template that Jinja accepts.

    Returns:
        What a user should know about the template, a line each.

    Raises:
        UserError: the tokenizer or the template is missing, or the template has a syntax error.
    """
    name = model.tokenizer_path or model.path
    folder = model_folder(name, cache)
    if data.chat_template is not None:
        if not Path(data.chat_template).is_file():
            raise UserError(f"data.chat_template {data.chat_template}: there is no such file")
        where = f"data.chat_template {data.chat_template}"
        template: str | None = read_template(Path(data.chat_template), where)
    elif folder is None:
        if model.tokenizer_path is None:
            return None  # the check of the model reports it
        if Path(name).exists() or not _HUB_NAME.fullmatch(name):
            raise UserError(f"model.tokenizer_path {name}: there is no such folder, and this is not a name on the hub")
        if cache.offline:
            raise UserError(not_cached(f"model.tokenizer_path {name}", name, cache.models, cache.offline))
        if cache.model_folder(name) is None:
            look_up(f"model.tokenizer_path {name}", name, "model", cache)
        return None
    elif not any((folder / one).is_file() for one in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserError(f"{folder} has no tokenizer; set model.tokenizer_path")
    else:
        where, template = f"the tokenizer in {folder}", stored_template(folder)
        if template is None and not any(folder.glob("chat_template.*")):
            raise UserError(f"the tokenizer in {folder} has no chat template; set data.chat_template to a Jinja file")
    if template is None:
        return None
    check_template(template, where)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    used, learns = with_variables(template, data.chat_template_kwargs), isinstance(data, FinetuneDataConfig)
    return "\n".join(remarks(used, added_tokens(folder), special_tokens(folder), learns)) or None


def model_folder(path: str, cache: HubCache) -> Path | None:
    """Return the folder of a model, given by its path or, if nodes are offline, by its name in the cache."""
    if Path(path).is_dir():
        return Path(path)
    return cache.model_folder(path) if cache.offline and _HUB_NAME.fullmatch(path) else None
