"""The shape of a model: what its config.json tells about parameters, without its weights and without torch.

A model is a sequence of layers (layers.py), an embedding and an LM head. families.py has what differs between types of
models. Shape suffixes: H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.plan.families import FAMILIES, Family, settings_of
from hpc_rl.plan.layers import AttentionShape, LayerReader, LayerShape
from hpc_rl.plan.mixers import total

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder. Counts are numbers of parameters."""

    family: str
    """`model_type`."""
    hidden: int
    heads: int
    vocabulary: int
    layers: tuple[LayerShape, ...]
    tied: bool = False
    """Whether the LM head is the embedding."""
    outside: int = 0
    """Parameters that are neither in a layer nor in embedding and LM head: the last norm, further embeddings."""
    outside_active: int = 0
    """Those of them that a token's matrix products use."""
    layer_inputs: int = 0
    """Numbers of a token that are added to all layers (Gemma 3n and 4)."""
    streams: int = 0
    """Numbers of a token in the streams between layers (Gemma 3n); 0 if it has one hidden state."""
    has_scores: bool = False
    """Whether attention has soft-capped scores, sinks, dropout, or values of another size than keys, so that training
    holds the scores of a block of queries."""
    has_cap: bool = False
    """Whether the logits are soft-capped, so that the loss holds the slope of this function."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What is not exact about these counts."""

    @cached_property
    def kinds(self) -> tuple[tuple[LayerShape, int], ...]:
        """The kinds of layers, and the number of layers of each of them."""
        counts = Counter(map(id, self.layers))
        return tuple((next(one for one in self.layers if id(one) == key), count) for key, count in counts.items())

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the LM head."""
        return self.vocabulary * self.hidden

    @cached_property
    def largest(self) -> LayerShape:
        """The layer with the most parameters."""
        return max(self.layers, key=lambda layer: layer.parameters)

    @cached_property
    def blocks(self) -> int:
        """Parameters of all layers."""
        return sum(count * layer.parameters for layer, count in self.kinds)

    @property
    def total(self) -> int:
        """Parameters of the language model; tied ones count once."""
        return self.blocks + self.outside + self.embedding * (1 if self.tied else 2)

    @property
    def total_as_classifier(self) -> int:
        """Parameters of a model with one output instead of the LM head, such as a critic."""
        return self.blocks + self.outside + self.embedding + self.hidden

    @cached_property
    def active(self) -> int:
        """Parameters that a token's matrix products use, with the LM head."""
        return sum(count * layer.active for layer, count in self.kinds) + self.outside_active + self.embedding

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return any(layer.experts for layer, _ in self.kinds)

    @cached_property
    def attentions(self) -> tuple[AttentionShape, ...]:
        """The attention of all layers that have it."""
        return tuple(one for layer in self.layers for one in layer.attentions)

    def may_be_split(self, ranks: int) -> bool:
        """Return whether so many ranks can share a row (trainer.sequence_parallel)."""
        if any(layer.mixer for layer, _ in self.kinds):
            return ranks == 1  # a state needs whole samples
        return all(one.heads % ranks == 0 for one in self.attentions)


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """Read the shape of a model from the contents of its config.json.

    Args:
        name: of the model, for errors.

    Raises:
        UserError: settings are missing, or the model has layers that are not counted.
    """
    family, found = settings_of(config, name)
    reader = LayerReader(family, found)
    sizes = {key: reader.count if key == "num_hidden_layers" else reader.size(key) for key in _NEEDED}
    if missing := [key for key, size in sizes.items() if not size]:
        raise UserError(
            f"{name}: its config.json has no {' and no '.join(missing)}, so its memory cannot be planned; models like "
            f"Llama have them ({', '.join(FAMILIES)})"
        )
    hidden, heads, vocabulary = sizes["hidden_size"], sizes["num_attention_heads"], sizes["vocab_size"]
    if not reader.size("head_dim", hidden // heads):
        raise UserError(f"{name}: its config.json has {heads} attention heads for a hidden size of {hidden}")
    outside, active = _outside(family, reader)
    kind, layers = found["model_type"], reader.layers()
    return Shape(
        family=kind,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        layers=layers,
        tied=bool(found.get("tie_word_embeddings", False)),
        outside=outside,
        outside_active=active,
        layer_inputs=reader.count * reader.size("hidden_size_per_layer_input"),
        streams=reader.size("altup_num_inputs", 4) * hidden if reader.size("laurel_rank") else 0,
        has_scores=bool(family.is_scored or found.get("attention_dropout")) or _has_other_values(layers),
        has_cap=bool(found.get("capped")),
        notes=() if kind in FAMILIES else (f"{name} is of type {kind or 'unknown'}, which is counted like Llama",),
    )


def _has_other_values(layers: tuple[LayerShape, ...]) -> bool:
    return any(one.head_size != one.value_size for layer in layers for one in layer.attentions)


def _outside(family: Family, reader: LayerReader) -> tuple[int, int]:
    """Return the parameters outside of layers, embedding and LM head, and those that matrix products use."""
    hidden, size = reader.hidden, reader.size
    outside, active = total(family.final, H=hidden), 0
    if "n_embd" in reader.found:  # learned positions
        outside += size("n_positions", size("max_position_embeddings", 1024)) * hidden
    if width := size("hidden_size_per_layer_input"):
        active = reader.count * width * hidden
        outside += size("vocab_size_per_layer_input", size("vocab_size")) * reader.count * width + active + width
    if size("laurel_rank"):
        streams = 2 * (size("altup_num_inputs", 4) - 1) * hidden**2
        outside, active = outside + streams, active + streams
    return outside, active
