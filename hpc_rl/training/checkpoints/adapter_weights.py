"""The weights of a checkpoint as they are exported: all of them, or adapters merged into the model's, or alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import is_classifier
from hpc_rl.formats.peft_folder import CONFIG, DOWN, HEAD, PREFIX, UP, WEIGHTS
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.checkpoints.model_state import StoredWeight
from hpc_rl.training.models import loading, safetensors_files
from hpc_rl.training.models.four_bit import bitsandbytes, rounded_to_four_bits
from hpc_rl.training.models.lora import block_linears, is_adapter, merged, rounded
from hpc_rl.training.models.pretrained import Pretrained
from hpc_rl.training.models.safetensors_files import Stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_ALONE = "the adapters alone (hpc-rl export --no-merge)"


class Weights(Protocol):
    """The weights of a model by their Hugging Face names."""

    stored: dict[str, StoredWeight]
    """Type and size of each of them."""

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return one of them, in this type if it has numbers with a fraction."""
        ...


def has_adapters(part: Path) -> bool:
    """Return whether a model's part of a checkpoint has adapters only."""
    return (part / model_state.HF / CONFIG).exists()


def open_weights(part: Path, hf: PreTrainedModel, four_bit: bool, base: str | None = None) -> Weights:
    """Return the weights of a model's part of a checkpoint, with adapters merged.

    Args:
        hf: the model without memory.
        four_bit: whether the weights below the adapters had 4 bits. Adapters also make up for their rounding, so they
            are merged into the rounded weights.
        base: the folder where the model of adapters is now; None for where it was.

    Raises:
        UserError: there is no checkpoint, or the model of its adapters cannot be read or rounded.
    """
    return _Merged(part, hf, four_bit, base) if has_adapters(part) else _Plain(part)


class _Plain:
    """The weights that a checkpoint has."""

    def __init__(self, part: Path) -> None:
        self._part = part
        self.stored = model_state.stored_weights(part)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight in a type."""
        return model_state.read_weights(self._part, [name], dtype)[name]


class _Merged:
    """The weights of the model that adapters belong to, with the adapters merged into them."""

    def __init__(self, part: Path, hf: PreTrainedModel, four_bit: bool, base: str | None) -> None:
        self._part = part
        if four_bit:
            bitsandbytes(f"export {_ALONE}")
        self._four_bit = {f"{name}.weight" for name in block_linears(hf)} if four_bit else set()
        config = json.loads((part / model_state.HF / CONFIG).read_text())
        self._scale = config["lora_alpha"] / config["r"]
        self._trained = model_state.stored_weights(part)
        self._base = _base_weights(base or str(config["base_model_name_or_path"]), hf)
        self.stored = {name: StoredWeight(weight.dtype, weight.shape) for name, weight in self._base.items()}
        self.stored |= {name: weight for name, weight in self._trained.items() if not is_adapter(name)}  # a head

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight in a type, with its adapter merged into it."""
        if name in self._trained:
            return model_state.read_weights(self._part, [name], dtype)[name]
        found = self._base[name]
        weight = found if isinstance(found, torch.Tensor) else found.whole()
        if name in self._four_bit:
            weight = rounded_to_four_bits(weight)
        layer = name.removesuffix(".weight")
        down, up = f"{layer}.{DOWN}.weight", f"{layer}.{UP}.weight"
        if down in self._trained:
            both = model_state.read_weights(self._part, [down, up])
            return rounded(merged(weight, both[down], both[up], self._scale), dtype, name)
        return weight.to(dtype) if weight.dtype.is_floating_point else weight


def _base_weights(base: str, hf: PreTrainedModel) -> dict[str, Stored] | dict[str, torch.Tensor]:
    """Return where the weights of a model are stored, or the weights themselves if transformers has to load them."""
    head = HEAD if is_classifier(hf.config.architectures) else ""
    auto = "AutoModelForSequenceClassification" if head else "AutoModelForCausalLM"
    settings = {"num_labels": hf.config.num_labels} if head else {}
    pretrained: Pretrained[Any] = Pretrained(
        auto, base, "model.path", hf.dtype, False, _unused, settings, new_head=head
    )
    try:
        stored = loading.stored_weights(pretrained, hf)
        return loading.weights_of(pretrained.load_module()[0]) if stored is None else stored
    except UserError as error:
        raise UserError(
            f"{error}; the adapters were trained on this model, so make it available, or export {_ALONE}"
        ) from error


def _unused(hf: PreTrainedModel, _missing: frozenset[str]) -> PreTrainedModel:
    return hf


def write_peft_weights(part: Path, folder: Path, dtype: str | None) -> None:
    """Write adapters, and a head if there is one, as a file that peft loads.

    Args:
        dtype: None for the type in which they were trained.
    """
    stored = model_state.stored_weights(part)
    types = {PREFIX + name: getattr(torch, dtype) if dtype else weight.dtype for name, weight in stored.items()}

    def read(name: str) -> torch.Tensor:
        own = name.removeprefix(PREFIX)
        return model_state.read_weights(part, [own])[own]

    sizes = {PREFIX + name: weight.size for name, weight in stored.items()}
    safetensors_files.write(folder / WEIGHTS, sizes, types, read)
