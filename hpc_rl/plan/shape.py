"""The shape of a model: what its config.json tells about parameters, without its weights and without torch.

Families whose layers are built as in Llama (https://arxiv.org/abs/2302.13971) are counted: attention with grouped
heads, a gated MLP or a mixture of such experts, and RMSNorm. Shape suffixes: H hidden size, I inner size of the MLP,
Q all query heads, K all key heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import has_mixers

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {"expert_size": "intermediate_size"},
    "olmo2": {"qk_norm": "whole"},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True, "shared_gate": True},
    "qwen3": {"qk_norm": "head"},
    "qwen3_moe": {"qk_norm": "head"},
    "gemma": {"tied": True},
    "gemma2": {"tied": True, "norms": 4, "scored": True, "capped": True},
    "gpt_oss": {"expert_size": "intermediate_size", "biases": True, "scored": True},
}
"""model_type of a config.json -> what differs from Llama. Other types are counted like Llama, with a note."""
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OTHER_LAYERS = {
    "kv_lora_rank": "multi-head latent attention",
    "linear_num_value_heads": "linear attention",
    "mamba_d_state": "state-space layers",
    "quantization_config": "quantised weights",
}
"""Setting -> what is not counted."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a layer."""

    count: int
    active: int
    """Experts that compute each token."""
    inner: int
    """I of one expert."""
    shared: int = 0
    """I of the expert that computes every token; 0 without one."""
    shared_gate: bool = False
    """Whether a gate of H weights belongs to the shared expert."""
    has_biases: bool = False
    """Whether the experts and the router have biases."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder. Counts are numbers of parameters."""

    family: str
    """`model_type`."""
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    tied: bool = False
    """Whether the LM head is the embedding."""
    experts: Experts | None = None
    dense_layers: int = 0
    """Layers of a mixture of experts that have a usual MLP."""
    vectors: int = 0
    """Parameters of the norms, biases and sinks of a layer."""
    has_qk_norm: bool = False
    """Whether attention normalises queries and keys, so that training keeps more of them."""
    has_window: bool = False
    """Whether some layers attend to a window of tokens only, so that engines cache less for them."""
    has_scores: bool = False
    """Whether attention has soft-capped scores, sinks or dropout, so that training holds the scores of a block of
    queries."""
    has_cap: bool = False
    """Whether the logits are soft-capped, so that the loss holds the slope of this function."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What is not exact about these counts."""

    @property
    def queries(self) -> int:
        """Q: the width of all query heads."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """K: the width of all key heads."""
        return self.key_heads * self.head_size

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each linear layer in the largest kind of layer, by Llama's names. Routed experts are not
        included: transformers has all experts of a layer in one tensor, which adapters and quantisation leave as it
        is."""
        if self.experts is None:
            return self._linears(self.inner)
        gate = {"shared_expert_gate": (1, self.hidden)} if self.experts.shared_gate else {}
        return self._linears(self.experts.shared) | gate

    @property
    def kinds(self) -> tuple[tuple[int, dict[str, tuple[int, int]]], ...]:
        """The kinds of layers: the number of layers, and the linear layers of each of them as in `linears`."""
        return (self.layers - self.dense_layers, self.linears), (self.dense_layers, self._linears(self.inner))

    @property
    def attention(self) -> int:
        """Parameters of the attention of a layer, with all norms and biases of the layer."""
        return 2 * self.hidden * (self.queries + self.keys) + self.vectors

    @property
    def layer(self) -> int:
        """Parameters of the largest kind of layer."""
        return self.attention + (3 * self.hidden * self.inner if self.experts is None else self._mixture())

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the LM head."""
        return self.vocabulary * self.hidden

    @property
    def blocks(self) -> int:
        """Parameters of all layers."""
        dense = self.dense_layers * (self.attention + 3 * self.hidden * self.inner)
        return (self.layers - self.dense_layers) * self.layer + dense

    @property
    def total(self) -> int:
        """Parameters of the language model; tied ones count once."""
        return self.blocks + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def total_as_classifier(self) -> int:
        """Parameters of a model with one output instead of the LM head, such as a critic."""
        return self.blocks + self.hidden + self.embedding + self.hidden

    @property
    def active(self) -> int:
        """Parameters that a token's matrix products use, with the LM head."""
        if self.experts is None:
            return self.blocks + self.embedding
        used = self.attention + self._mixture(self.experts.active)
        dense = self.dense_layers * (self.attention + 3 * self.hidden * self.inner)
        return (self.layers - self.dense_layers) * used + dense + self.embedding

    @property
    def working_inner(self) -> int:
        """The width of a layer's MLP activations for one token: with experts, of all that compute it."""
        if self.experts is None:
            return self.inner
        return self.experts.active * self.experts.inner + self.experts.shared

    @property
    def routed(self) -> int:
        """The width of a token's copies, one for each expert that computes it; 0 without experts."""
        return 0 if self.experts is None else self.experts.active * self.hidden

    def may_be_split(self, ranks: int) -> bool:
        """Return whether so many ranks can share a row (trainer.sequence_parallel)."""
        return self.heads % ranks == 0

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Return the bytes of one token in a KV cache."""
        return 2 * self.layers * self.keys * itemsize

    def _linears(self, inner: int) -> dict[str, tuple[int, int]]:
        """Return the linear layers of attention and of a gated MLP; without an MLP if `inner` is 0."""
        hidden = self.hidden
        attention = {
            "q_proj": (self.queries, hidden),
            "k_proj": (self.keys, hidden),
            "v_proj": (self.keys, hidden),
            "o_proj": (hidden, self.queries),
        }
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        return attention | mlp if inner else attention

    def _mixture(self, experts: int | None = None) -> int:
        """Return the parameters of a mixture, with all or some of its experts."""
        assert self.experts is not None
        mixture = self.experts
        count = mixture.count if experts is None else experts
        weights = 3 * self.hidden * (count * mixture.inner + mixture.shared)
        if mixture.has_biases:
            weights += count * (2 * mixture.inner + self.hidden) + mixture.count
        return weights + self.hidden * (mixture.count + (1 if mixture.shared_gate else 0))


def shape_of(config: Mapping[str, Any], name: str) -> Shape:
    """Read the shape of a model from the contents of its config.json.

    Args:
        name: of the model, for errors.

    Raises:
        UserError: settings are missing, or the model has layers that are not counted.
    """
    inner = config.get("text_config")
    found = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    family = str(found.get("model_type", ""))
    if missing := [key for key in _NEEDED if not _is_size(found.get(key))]:
        raise UserError(
            f"{name}: its config.json has no {' and no '.join(missing)}, so its memory cannot be planned; models like "
            f"Llama have them ({', '.join(FAMILIES)})"
        )
    for key, kind in _OTHER_LAYERS.items():
        if found.get(key):
            raise UserError(f"{name}: models of type {family} have {kind}, whose memory is not planned")
    if has_mixers(found):
        raise UserError(f"{name}: models of type {family} have layers with a state, whose memory is not planned")
    special = FAMILIES.get(family, {})
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    head_size = _size(found, "head_dim", hidden // heads)
    key_heads = _size(found, "num_key_value_heads", heads)
    if head_size < 1:
        raise UserError(f"{name}: its config.json has {heads} attention heads for a hidden size of {hidden}")
    experts = _experts(found, special)
    layers = found["num_hidden_layers"]
    return Shape(
        family=family,
        hidden=hidden,
        inner=found["intermediate_size"],
        layers=layers,
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        vocabulary=found["vocab_size"],
        tied=bool(found.get("tie_word_embeddings", special.get("tied", False))),
        experts=experts,
        dense_layers=_dense_layers(found, layers) if experts is not None else 0,
        vectors=_vectors(found, special, hidden, heads * head_size, key_heads * head_size, head_size),
        has_qk_norm="qk_norm" in special,
        has_window=_has_window(found),
        has_scores=bool(special.get("scored") or found.get("attention_dropout")),
        has_cap=bool(found.get("final_logit_softcapping", special.get("capped"))),
        notes=() if family in FAMILIES else (f"{name} is of type {family or 'unknown'}, which is counted like Llama",),
    )


def _experts(found: Mapping[str, Any], special: Mapping[str, Any]) -> Experts | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((found[name] for name in names if _is_size(found.get(name))), None)
    if count is None:
        return None
    inner = _size(found, special.get("expert_size", "moe_intermediate_size"), found["intermediate_size"])
    return Experts(
        count=count,
        active=_size(found, "num_experts_per_tok", _size(found, "top_k_experts", 2)),
        inner=inner,
        shared=_size(found, "shared_expert_intermediate_size", _size(found, "n_shared_experts", 0) * inner),
        shared_gate=bool(special.get("shared_gate")),
        has_biases=bool(special.get("biases")),
    )


def _dense_layers(found: Mapping[str, Any], layers: int) -> int:
    """Return how many layers of a mixture of experts have a usual MLP (mlp_only_layers, decoder_sparse_step,
    first_k_dense_replace)."""
    alone, step = found.get("mlp_only_layers"), _size(found, "decoder_sparse_step", 1)
    first = _size(found, "first_k_dense_replace", 0)
    listed = alone if isinstance(alone, list) else []
    return sum(index in listed or (index + 1) % step > 0 or index < first for index in range(layers))


def _vectors(
    found: Mapping[str, Any], special: Mapping[str, Any], hidden: int, queries: int, keys: int, head_size: int
) -> int:
    """Return the parameters of the norms, biases and sinks of a layer."""
    total = int(special.get("norms", 2)) * hidden
    has_bias = found.get("attention_bias", special.get("biases"))
    if special.get("qkv_bias") or has_bias:
        total += queries + 2 * keys
    if has_bias and not special.get("qkv_bias"):
        total += hidden
    if special.get("biases"):
        total += queries // head_size  # sinks
    if found.get("mlp_bias"):
        total += 2 * found["intermediate_size"] + hidden
    return total + {"head": 2 * head_size, "whole": queries + keys}.get(special.get("qk_norm", ""), 0)


def _has_window(found: Mapping[str, Any]) -> bool:
    types = found.get("layer_types")
    if isinstance(types, list):
        return "sliding_attention" in types
    return bool(found.get("sliding_window")) and found.get("use_sliding_window") is not False


def _size(found: Mapping[str, Any], key: str, default: int) -> int:
    """Return a size that a config.json may leave out, or set to null."""
    return int(found[key]) if _is_size(found.get(key)) else default


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
