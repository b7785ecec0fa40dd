"""Sizes of models for simulations and plans."""

from __future__ import annotations

from typing import Any

from tests.plan.families import FEW_LAYERS, few_layers

Shape = str
"""A key of SHAPES or of tests.plan.families.FEW_LAYERS."""

_COLUMNS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_COLUMNS += ("num_key_value_heads",)
_SHAPES = {
    "tiny": (1024, 256, 512, 2, 8, 2),
    "0.5B": (151936, 896, 4864, 24, 14, 2),
    "Qwen3-0.6B": (151936, 1024, 3072, 28, 16, 8),
    "1.5B": (151936, 1536, 8960, 28, 12, 2),
    "7B": (152064, 3584, 18944, 28, 28, 4),
    "14B": (152064, 5120, 13824, 48, 40, 8),
    "32B": (152064, 5120, 27648, 64, 40, 8),
}
SHAPES: dict[Shape, dict[str, Any]] = {
    name: {
        **{"model_type": "qwen2", **dict(zip(_COLUMNS, row, strict=True))},
        **({"tie_word_embeddings": True} if row[0] == 151936 else {}),
    }
    for name, row in _SHAPES.items()
}
SHAPES["Qwen3-0.6B"] |= {"model_type": "qwen3", "head_dim": 128}
"""Qwen2.5's shapes, one of Qwen3, whose attention normalises queries and keys, and a small one."""


def sizes(shape: Shape, layers: int | None = None) -> dict[str, Any]:
    """Return the configuration of a shape, perhaps with another number of layers."""
    if shape in FEW_LAYERS:
        return few_layers(shape)
    return {**SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})}
