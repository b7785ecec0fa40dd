"""Whether a model can be loaded: its folder, its weights, its tokenizer and its chat template."""

from __future__ import annotations

import re
from pathlib import Path

from hpc_rl.config.ppo import PromptDataConfig
from hpc_rl.config.sft import DataConfig
from hpc_rl.config.training import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.host.files import read_json
from hpc_rl.submission.hub import HubCache

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def check_model(model: ModelConfig, coming: Path | None, cache: HubCache) -> str | None:
    """A folder or a name on the hub.

    Args:
        coming: the model of a job that this one waits for, which need not be there yet.
    """
    if coming is not None and Path(model.path).absolute() == coming and not coming.exists():
        return f"model {model.path} is what the job before this one exports"
    return check_model_path("model.path", model.path, cache)


def check_model_path(key: str, path: str, cache: HubCache) -> str | None:
    """A folder must hold a Hugging Face model, and so must the cache where it is all that the job has."""
    folder = _model_folder(path, cache)
    if folder is None:
        if Path(path).exists() or not _HUB_NAME.fullmatch(path):
            raise UserError(f"{key} {path}: no such folder, and no name of a model on the hub")
        if cache.offline:
            raise UserError(not_cached(f"{key} {path}", path, cache.models))
        return f"model {path} is a name on the hub: it is looked up when the job starts"
    remedy = "" if Path(path).is_dir() else f": hpc-rl fetch {path}"
    if "model_type" not in read_json(folder / "config.json"):
        raise UserError(f"{key} {path} is no Hugging Face model: no config.json with a model_type in it")
    weights = {file.name for kind in ("safetensors", "bin") for file in folder.glob(f"*.{kind}") if file.is_file()}
    if not weights:
        raise UserError(f"{key} {path} has no weights (*.safetensors or *.bin){remedy}")
    named = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if isinstance(named, dict) and (missing := sorted(set(named.values()) - weights)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{key} {path} is incomplete: no {missing[0]}{more} in {folder}{remedy}")
    return None


def check_chat_template(model: ModelConfig, data: DataConfig | PromptDataConfig, cache: HubCache) -> None:
    if data.chat_template is not None:
        if not Path(data.chat_template).is_file():
            raise UserError(f"data.chat_template {data.chat_template}: no such file")
        return
    name = model.tokenizer_path or model.path
    folder = _model_folder(name, cache)
    if folder is None:
        if cache.offline and model.tokenizer_path is not None:
            raise UserError(not_cached(f"model.tokenizer_path {name}", name, cache.models))
        return
    settings = folder / "tokenizer_config.json"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise UserError(f"{folder} has no tokenizer; set model.tokenizer_path")
    if not read_json(settings).get("chat_template") and not any(folder.glob("chat_template.*")):
        raise UserError(f"the tokenizer in {folder} has no chat template; set data.chat_template to a Jinja file")


def _model_folder(path: str, cache: HubCache) -> Path | None:
    """The folder that a path or, offline, a name on the hub stands for; None where there is none (yet)."""
    if Path(path).is_dir():
        return Path(path)
    return cache.model_folder(path) if cache.offline and _HUB_NAME.fullmatch(path) else None


def not_cached(what: str, name: str, where: Path) -> str:
    return f"{what} is not in the cache {where}, and compute nodes are offline (cache.offline): hpc-rl fetch {name}"
