"""Small models with random weights that have parts for images, in the layout in which such models are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.small_models.families import make_model

LANGUAGE = ("language_model.", "model.language_model.", "model.text_model.", "lm_head.", "model.layers.", "model.norm.")
LANGUAGE += ("model.embed_tokens.",)


def is_of_language(name: str) -> bool:
    """Whether a weight in a file belongs to the language model."""
    return name.startswith(LANGUAGE)


def make_wrapper(folder: Path, kind: str, predicts_several: bool = False, **settings: Any) -> Path:
    """Save a model of this type with its tokenizer, in two files; parts for images are bfloat16, the rest float32.

    Args:
        predicts_several: whether the files also have a layer that predicts several tokens.
        settings: of the language model.
    """
    make_model(folder, kind, **settings)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Pretend", "size": kind}))
    weights = load_file(folder / "model.safetensors")
    if predicts_several:
        weights["mtp.fc.weight"] = torch.randn(128, 256)
    (folder / "model.safetensors").unlink()
    _save(folder, {name: w if is_of_language(name) else w.bfloat16() for name, w in weights.items()})
    return folder


def read_files(folder: Path) -> dict[str, torch.Tensor]:
    """All weights in the files of a model."""
    return {name: w for file in sorted(folder.glob("*.safetensors")) for name, w in load_file(file).items()}


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    names, places = list(weights), {}
    for number, half in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({name: weights[name].contiguous() for name in half}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(half, file)
    total = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
