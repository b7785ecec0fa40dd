"""What a model's config.json declares it to be: a language model, or a classifier such as a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_rl.host.files import read_json


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
