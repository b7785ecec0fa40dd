"""What the files of a model declare it to be: a language model, or a classifier such as a reward model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.host.files import read_json
from hpc_rl.host.safetensors_header import shapes

_HEAD = "score.weight"
"""Name of the head's weight in transformers' sequence classifiers based on decoder models."""
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
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures or ())


def architectures_of(folder: Path) -> list[str]:
    """Return the `architectures` of a model folder; empty if it declares none."""
    found = read_json(folder / "config.json").get("architectures")
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
        raise UserError(f"{key} {path} has {found} output{'' if found == 1 else 's'}, not {needed}: {_REMEDIES[key]}")
