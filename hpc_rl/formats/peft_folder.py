"""A folder with LoRA adapters in the format of peft: adapter_config.json and adapter_model.safetensors.

https://huggingface.co/docs/peft/developer_guides/checkpoint describes it. Standard library only, so that such a folder
is checked before a job is queued.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.formats.safetensors_header import shapes
from hpc_rl.system.files import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft puts before the names of a model's weights."""
DOWN, UP = "lora_A", "lora_B"
"""Names of an adapter's two layers: input -> rank, and rank -> output."""
_EXPERTS = ".experts."
"""Part of the names of a mixture's experts. Shared experts have other names."""
_UNSUPPORTED = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias", "rank_pattern"),
    *("alpha_pattern", "trainable_token_indices", "layer_replication", "target_parameters", "alora_invocation_tokens"),
    *("velora_config", "monteclora_config", "arrow_config", "kasa_config"),
)
"""Settings of adapters that compute something else."""
_OF_FILES = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "architectures",
    "pad_token_id",
}
"""Settings of a config.json that may differ between two copies of a model."""
_BASE = "base_model_name_or_path"
_OPTIONS = {
    _BASE: "model.path",
    "r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "target_modules": "model.lora.target_modules",
}
"""Settings that have to stay the same while adapters are trained -> the options that set them."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
HEAD = "score"
"""Name of the head of a classifier, which peft saves as a whole."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class PeftFolder:
    """What a folder with adapters contains."""

    path: Path
    base: str
    """Folder or name of the model that the adapters were trained on."""
    rank: int
    alpha: float
    shapes: dict[str, Shape]
    """Shape of each tensor, by its name in the model."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the layers that have an adapter."""
        ending = f".{DOWN}.weight"
        return tuple(name.removesuffix(ending) for name in self.shapes if name.endswith(ending))


def read_peft_folder(key: str, path: Path) -> PeftFolder:
    """Read what a folder with adapters contains, without its tensors.

    Args:
        key: the option that names it, for errors.

    Raises:
        UserError: it has no LoRA adapters, or a variant of LoRA that is computed in another way.
    """
    what = f"{key} {path}"
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise UserError(f"{what} is not a folder with adapters in the format of peft: it has no {name}")
    config = read_json(path / CONFIG, named=True)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{what} has adapters of type {config.get('peft_type')}, but only LORA is supported")
    special = [name for name in _UNSUPPORTED if config.get(name)]
    special += ["bias"] if config.get("bias", "none") != "none" else []
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        special.append(f"init_lora_weights={config['init_lora_weights']}")  # which changes the model's own weights
    if special:
        raise UserError(f"{what} has adapters with {' and '.join(special)}, which is not supported: use plain LoRA")
    try:
        stored = shapes(path / WEIGHTS)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{what}: {WEIGHTS} cannot be read: {error}") from error
    found = {name.removeprefix(PREFIX): shape for name, shape in stored.items()}
    try:
        folder = PeftFolder(
            path, str(config.get("base_model_name_or_path")), int(config["r"]), float(config["lora_alpha"]), found
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{what}: {CONFIG} has no rank and alpha (r, lora_alpha)") from error
    wrong = [name for name, shape in found.items() if f".{DOWN}." in name and shape[0] != folder.rank]
    if not folder.modules or wrong:
        raise UserError(f"{what}: {WEIGHTS} has no adapters of rank {folder.rank}, which {CONFIG} states")
    return folder


def refuse_other_base(key: str, folder: PeftFolder, model: str, weights: Mapping[str, Shape]) -> None:
    """Check that adapters fit a model, as far as names, configurations and shapes show it.

    Args:
        key: the option that names the folder, for errors.
        model: the option model.path.
        weights: shape of the model's weights by name.

    Raises:
        UserError: the adapters were trained on another model; the message gives the first difference.
    """
    what = f"{key} {folder.path} was trained on another model ({folder.base}) than model.path {model}"
    if problem := _other_settings(folder.base, model):
        raise UserError(f"{what}: {problem}; set model.path to the adapters' model")
    for name in folder.modules:
        shape = weights.get(f"{name}.weight")
        theirs = (*folder.shapes.get(f"{name}.{UP}.weight", ())[:1], *folder.shapes[f"{name}.{DOWN}.weight"][1:])
        if shape != theirs:
            found = "is missing" if shape is None else f"has the shape {_text(shape)}"
            raise UserError(f"{what}: the adapter of {name} is for a weight of {_text(theirs)}, which here {found}")
    adapters = {f"{name}.{part}.weight" for name in folder.modules for part in (DOWN, UP)}
    for name in sorted(folder.shapes.keys() - adapters - {f"{HEAD}.weight"}):
        raise UserError(f"{key} {folder.path} also has {name}, which is no adapter of a linear layer: use plain LoRA")


def _other_settings(base: str, model: str) -> str | None:
    """Return a difference between two models: their names on the hub, or the first setting in their folders."""
    if _are_on_hub(base, model):
        return None if base == model else "their names on the hub differ"
    theirs, ours = (read_json(Path(path) / "config.json", named=True) for path in (base, model))
    differ = [name for name in sorted((theirs.keys() & ours.keys()) - _OF_FILES) if theirs[name] != ours[name]]
    return f"{differ[0]} is {theirs[differ[0]]} there and {ours[differ[0]]} here" if differ else None


def _are_on_hub(*names: str) -> bool:
    return all(_HUB_NAME.fullmatch(name) and not Path(name).exists() for name in names)


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def matching(targets: Sequence[str], layers: Iterable[str], weights: Iterable[str]) -> list[str]:
    """Return the linear layers that `target_modules` names, by the last parts of their names; all of them for no name.

    Args:
        weights: names of all weights of the model.

    Raises:
        UserError: a name matches no layer; the message lists those that there are.
    """
    layers = list(layers)
    for target in targets:
        if not any(_is_named(layer, target) for layer in layers):
            there = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers})) or "none"
            found = "matches no linear layer of the model's transformer blocks"
            if any(_EXPERTS in name and f".{target}." in f".{name}." for name in weights):
                found = (
                    "names experts, which cannot have adapters: all experts of a layer are one tensor, and engines "
                    "load adapters of such tensors for a few types of models only"
                )
            raise UserError(f"model.lora.target_modules: {target} {found}; the linear layers are: {there}")
    return [layer for layer in layers if not targets or any(_is_named(layer, target) for target in targets)]


def _is_named(layer: str, target: str) -> bool:
    return f".{layer}".endswith(f".{target}")


def block_layers(weights: Mapping[str, Shape]) -> list[str]:
    """Return the linear layers of transformer blocks among a model's weights: matrices of numbered modules, but for
    experts, which transformers loads as one tensor."""
    return [
        name.removesuffix(".weight")
        for name, shape in weights.items()
        if name.endswith(".weight") and len(shape) == 2 and re.search(r"\.\d+\.", name) and _EXPERTS not in name
    ]


def new_config(
    base: str, rank: int, alpha: float, dropout: float, targets: Sequence[str], head: str | None
) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    Args:
        targets: names of layers, or their last parts.
        head: the layer of a classifier that is trained as a whole; None for a language model.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head is None else "SEQ_CLS",
        "base_model_name_or_path": str(Path(base).absolute()) if Path(base).is_dir() else base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": list(targets),
        "modules_to_save": None if head is None else [head],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def changed_setting(stored: Mapping[str, Any], ours: Mapping[str, Any], continued: bool = False) -> str | None:
    """Return the first difference between the adapters of a checkpoint and a run's, or None.

    Args:
        stored, ours: contents of adapter_config.json, as `new_config` makes them.
        continued: whether the run's come from a folder, model.lora.path.
    """
    for setting, option in _OPTIONS.items():
        theirs, mine = (_comparable(setting, each.get(setting)) for each in (stored, ours))
        if theirs == mine or (setting == _BASE and _is_gone(theirs, mine)):
            continue
        who = "the adapters of model.lora.path have" if continued and setting != _BASE else "the run has"
        return f"its adapters have {option}={_shown(theirs)}, and {who} {_shown(mine)}"
    return None


def _is_gone(base: str, model: str) -> bool:
    """Return whether a base is no longer where it was, so that `model` may be the same one in another place."""
    return not Path(base).exists() and not _are_on_hub(base, model)


def _comparable(setting: str, value: Any) -> Any:
    """Two paths to the same folder are equal, and the order of names does not matter."""
    if setting == _BASE and Path(str(value)).exists():
        return os.path.realpath(value)
    return sorted(value) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)
