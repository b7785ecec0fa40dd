"""Sizes of models for simulations and plans."""

from __future__ import annotations

from typing import Any

from tests.plan.families import FEW_LAYERS, few_layers

Shape = str
"""A key of SHAPES or of tests.plan.families.FEW_LAYERS."""

SHAPES: dict[Shape, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "0.5B": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "1.5B": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7B": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "14B": {
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "32B": {
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}
"""Qwen2.5's shapes, one of Qwen3, whose attention normalises queries and keys, and a small one."""


def sizes(shape: Shape, layers: int | None = None) -> dict[str, Any]:
    """Return the configuration of a shape, perhaps with another number of layers."""
    if shape in FEW_LAYERS:
        return few_layers(shape)
    found = {"model_type": "qwen2", **SHAPES[shape]}
    return {**found, "num_hidden_layers": layers or found["num_hidden_layers"]}
