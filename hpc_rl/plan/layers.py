"""The layers of a model: what each of them has, from the settings of its family.

Shape suffixes: H hidden size, I inner size of the MLP, Q all query heads, K all key heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hpc_rl.plan.families import Family
from hpc_rl.plan.mixers import MixerShape, mixer_of, total

_TYPES = {
    **dict.fromkeys(("attention", "full_attention", "*"), "full"),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), "sliding"),
    **dict.fromkeys(("moe", "E"), "sparse"),
    **dict.fromkeys(("mlp", "-"), "dense"),
}
"""Type of a layer in a config.json -> what it has. All others have a state."""


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
    weights: int = 0
    """Parameters of the routed experts, without the router."""

    @property
    def idle(self) -> int:
        """Parameters of the experts that do not compute a token."""
        return round(self.weights * (1 - self.active / self.count))


@dataclass(frozen=True)
class AttentionShape:
    """The attention of a layer."""

    heads: int
    key_heads: int
    head_size: int
    """Of queries and keys."""
    value_size: int
    is_normed: bool = False
    """Whether it normalises queries and keys, so that training keeps more of them."""
    latent: int = 0
    """Width of what the layer caches for a token, with multi-head latent attention; 0 otherwise."""
    compressed: int = 0
    """Width of what training keeps to compute latent queries, keys and values; 0 without them."""
    window: int | None = None
    """Tokens to which a token attends; None for all before it."""
    shares: bool = False
    """Whether it uses the keys and values of another layer."""
    is_multiplied: bool = False
    """Whether a gate of the result's width multiplies it."""

    @property
    def queries(self) -> int:
        """Q: the width of all query heads."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """K: the width of all key heads."""
        return self.key_heads * self.head_size

    @property
    def values(self) -> int:
        """The width of all values."""
        return self.key_heads * self.value_size

    @property
    def result(self) -> int:
        """The width of the result."""
        return self.heads * self.value_size

    @property
    def cached(self) -> int:
        """Numbers that an engine caches for a token."""
        return 0 if self.shares else self.latent or self.keys + self.values


@dataclass(frozen=True)
class LayerShape:
    """A layer. Counts are numbers of parameters."""

    linears: tuple[tuple[str, int, int], ...]
    """Names, rows and columns of the linear layers: those that get adapters, and whose weights may be in 4 bits."""
    vectors: int = 0
    """Parameters that are neither linear layers nor experts: norms, biases, routers, convolutions."""
    experts: Experts | None = None
    attentions: tuple[AttentionShape, ...] = ()
    mixer: MixerShape | None = None
    inner: int = 0
    """The width of the activations of a usual MLP and of a shared expert."""
    norms: int = 0
    """Norms of the hidden size."""

    @cached_property
    def in_linears(self) -> int:
        """Parameters of the linear layers."""
        return sum(rows * columns for _, rows, columns in self.linears)

    @cached_property
    def parameters(self) -> int:
        """All parameters."""
        return self.in_linears + self.vectors + (self.experts.weights if self.experts else 0)

    @property
    def active(self) -> int:
        """Parameters that a token's matrix products use."""
        return self.parameters - (self.experts.idle if self.experts else 0)

    @property
    def working_inner(self) -> int:
        """The width of the MLP's activations for one token: with experts, of all that compute it."""
        return self.inner + (self.experts.active * self.experts.inner if self.experts else 0)


class LayerReader:
    """Reads the layers of a model from its settings.

    Args:
        found: settings by their standard names.
    """

    def __init__(self, family: Family, found: Mapping[str, Any]) -> None:
        self.family, self.found = family, found
        self.hidden = self.size("hidden_size")
        self.count = self.size("num_hidden_layers")
        if family.is_single and isinstance(kinds := found.get("layer_types"), list | str):
            self.count = len(kinds)
        self.kinds = self._kinds()

    def size(self, key: str, default: int = 0) -> int:
        """Return a size that a config.json may leave out."""
        value = self.found.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    def layers(self) -> tuple[LayerShape, ...]:
        """Return all layers."""
        known: dict[Any, LayerShape] = {}
        return tuple(self._layer(index, known) for index in range(self.count))

    def _kinds(self) -> list[str]:
        """Return what each layer has beside its MLP: `full` or `sliding` attention, or a `state`."""
        found, usual = self.found, "full"
        listed = found.get("layer_types")
        if isinstance(listed, list | str) and len(listed) == self.count:
            return [_TYPES.get(kind, "state" if self.family.mixer else "full") for kind in listed]
        if self.family.mixer:
            return self._kinds_with_states()
        if self.size("sliding_window") and found.get("use_sliding_window") is not False:
            usual = "sliding"
        step = self.size("sliding_window_pattern")
        return ["full" if step and (index + 1) % step == 0 else usual for index in range(self.count)]

    def _kinds_with_states(self) -> list[str]:
        """Return what each layer of a family with states has, if its settings do not list the types of layers."""
        found, count = self.found, self.count
        linear = found.get("linear_attn_config")
        if isinstance(linear, Mapping) and "full_attn_layers" in linear:
            full = {index - 1 for index in linear["full_attn_layers"]}
            return ["full" if index in full else "state" for index in range(count)]
        if isinstance(kinds := found.get("attn_type_list"), list):
            return ["full" if kind else "state" for kind in kinds]
        every = self.size("full_attention_interval")
        if self.family.mixer == "kimi":
            return ["full" if index and index % 4 == 0 else "state" for index in range(count)]
        if self.family.mixer == "lightning":
            return ["full" if index % 2 == 0 else "state" for index in range(count)]
        if self.family.mixer == "mamba":
            period, offset = self.size("attn_layer_period", 8), int(found.get("attn_layer_offset", 4))
            return ["full" if index % period == offset else "state" for index in range(count)]
        if every:
            return ["full" if (index + 1) % every == 0 else "state" for index in range(count)]
        indices = found.get("attn_layer_indices" if self.family.mixer == "mamba2" else "full_attn_idxs")
        default = () if self.family.mixer == "mamba2" else range(count)
        return ["full" if index in (default if indices is None else indices) else "state" for index in range(count)]

    def _is_sparse(self, index: int) -> bool:
        """Return whether a layer has experts instead of a usual MLP."""
        found = self.found
        kinds, moe = found.get("mlp_layer_types"), found.get("moe_layers")
        if isinstance(kinds, list) and index < len(kinds):
            return kinds[index] in ("sparse", 1, True)
        if isinstance(moe, list):
            return index in moe
        alone = found.get("mlp_only_layers")
        step = self.size("decoder_sparse_step", self.size("interleave_moe_layer_step", 1))
        if self.family.mixer == "mamba":
            return index % self.size("expert_layer_period", 2) == int(found.get("expert_layer_offset", 1))
        listed = alone if isinstance(alone, list) else []
        return not (index in listed or (index + 1) % step > 0 or index < self.size("num_dense_layers"))

    def _layer(self, index: int, known: dict[Any, LayerShape]) -> LayerShape:
        kind, family = self.kinds[index], self.family
        sparse = bool(self.size("num_experts") and self._is_sparse(index)) and self.found.get("enable_moe_block", True)
        if family.is_single:
            sparse = kind == "sparse"
        own = self._overrides(index, kind)
        shares = self.count - self.size("num_kv_shared_layers") <= index if self.size("num_kv_shared_layers") else False
        key = (kind, sparse, shares, *sorted(own.items()))
        if key not in known:
            known[key] = self._build(kind, sparse, shares, own)
        return known[key]

    def _overrides(self, index: int, kind: str) -> dict[str, int]:
        """Return the settings that one layer has in place of those of the model."""
        found = self.found
        own: dict[str, int] = {}
        if kind == "full" and (size := self.size("global_head_dim")):
            own["head_dim"] = size
            if heads := self.size("num_global_key_value_heads"):
                own["num_key_value_heads"] = heads
        if kind == "sliding":
            names = {"num_key_value_heads": "swa_num_key_value_heads", "head_dim": "swa_head_dim"}
            own |= {name: self.size(other) for name, other in names.items() if self.size(other)}
            if found["model_type"] == "mimo_v2_flash":
                own.setdefault("num_key_value_heads", 2 * self.size("num_key_value_heads"))
                own["sinks"] = 1
        listed = found.get("per_layer_config") or {}
        for number, values in listed.items() if isinstance(listed, Mapping) else enumerate(listed):
            if str(number).isdigit() and int(number) == index and isinstance(values, Mapping):
                own |= {name: value for name, value in values.items() if isinstance(value, int)}
        for name in ("num_attention_heads_per_layer", "intermediate_size"):
            if isinstance(listed := found.get(name), list) and index < len(listed):
                own[name.removesuffix("_per_layer")] = listed[index]
        return own

    def _build(self, kind: str, sparse: bool, shares: bool, own: Mapping[str, int]) -> LayerShape:
        """Return a layer, as the sum of its parts."""
        family, parts = self.family, [LayerShape((), total(self.family.norms, H=self.hidden), norms=self._norms())]
        reader = LayerReader.__new__(LayerReader)
        reader.__dict__.update(self.__dict__, found={**self.found, **own})
        if kind == "state" or family.is_parallel:
            assert family.mixer is not None
            linears, vectors, mixer = mixer_of(family.mixer, reader.size, self.found)
            parts.append(LayerShape(linears, vectors, mixer=mixer))
        if kind in ("full", "sliding") or family.is_parallel:
            parts += reader._attentions(kind, shares)
        if sparse:
            parts.append(reader._mixture())
        if kind == "dense" or not (family.is_single or sparse) or self.found.get("enable_moe_block"):
            parts.append(reader._mlp(2 if shares and self.found.get("use_double_wide_mlp") else 1))
        if self.found["model_type"] == "longcat_flash":
            parts += [parts[1], reader._mlp(1), reader._mlp(1), LayerShape((), 2 * self.hidden)]
        parts += reader._per_layer_inputs()
        return _merged(parts)

    def _norms(self) -> int:
        """Return the number of norms of the hidden size in a layer; biases follow them."""
        first = self.family.norms.partition("H")[0]
        return int(first or 1) if self.family.norms else 2

    def _attentions(self, kind: str, shares: bool) -> Iterator[LayerShape]:
        size, hidden, family = self.size, self.hidden, self.family
        if size("kv_lora_rank"):
            yield self._latent()
            return
        heads = size("num_attention_heads")
        head = size("head_dim", hidden // heads)
        key_heads = size("num_key_value_heads", 1 if self.found.get("multi_query") else heads)
        value = size("v_head_dim", head)
        attention = AttentionShape(
            heads,
            key_heads,
            head,
            value,
            is_normed=bool(re.search("[DQK]", family.attention)) and family.attention != "Q",
            window=size("sliding_window", size("attention_chunk_size")) if kind == "sliding" else None,
            shares=shares,
            is_multiplied=family.gate == "whole",
        )
        queries, keys, values, result = attention.queries, attention.keys, attention.values, attention.result
        equal = kind == "full" and bool(self.found.get("attention_k_eq_v"))
        inputs = [("q_proj", queries * (2 if family.gate == "whole" and family.mixer else 1), hidden)]
        if not shares:
            inputs += [("k_proj", keys, hidden), *([] if equal else [("v_proj", values, hidden)])]
        if family.is_fused[0]:
            inputs = [("qkv_proj", queries + keys + values, hidden)]
        linears = [*inputs, ("o_proj", hidden, result)]
        if family.gate == "heads":
            linears.append(("g_proj", heads, hidden))
        elif family.gate == "whole" and not family.mixer:
            linears.append(("gate_proj", result, hidden))
        vectors = total(family.attention, H=hidden, Q=queries, K=keys, D=head, N=heads)
        vectors -= head if shares else 0
        vectors += heads if size("sinks") else 0
        if self.found.get(family.biases[0]):
            vectors += sum(rows for _, rows, _ in inputs)
        if self.found.get(family.biases[1]):
            vectors += hidden
        yield LayerShape(tuple(linears), vectors, attentions=(attention,))

    def _latent(self) -> LayerShape:
        """Return multi-head latent attention (https://arxiv.org/abs/2405.04434)."""
        size, hidden, heads = self.size, self.hidden, self.size("num_attention_heads")
        plain, rotary, value = size("qk_nope_head_dim"), size("qk_rope_head_dim"), size("v_head_dim")
        rank, query_rank = size("kv_lora_rank"), size("q_lora_rank")
        queries = heads * (plain + rotary)
        linears = [("q_proj", queries, hidden)]
        if query_rank:
            linears = [("q_a_proj", query_rank, hidden), ("q_b_proj", queries, query_rank)]
        linears += [
            ("kv_a_proj_with_mqa", rank + rotary, hidden),
            ("kv_b_proj", heads * (plain + value), rank),
            ("o_proj", hidden, heads * value),
        ]
        biases = query_rank + rank + rotary + hidden if self.found.get("attention_bias") else 0
        # The inputs of two norms in float32, their results twice, and keys before the rotary part is added to them.
        kept = 4 * (query_rank + rank) + heads * plain
        attention = AttentionShape(heads, heads, plain + rotary, value, latent=rank + rotary, compressed=kept)
        return LayerShape(tuple(linears), query_rank + rank + biases, attentions=(attention,))

    def _mlp(self, times: int) -> LayerShape:
        """Return a usual MLP."""
        size, family = self.size, self.family
        inner = times * size("dense_intermediate_size", size("intermediate_size", 4 * self.hidden))
        if family.mixer == "convolution" and self.found.get("block_auto_adjust_ff_dim"):
            inner = int(float(self.found.get("block_ffn_dim_multiplier", 1.0)) * int(2 * inner / 3))
            step = size("block_multiple_of", 256)
            inner = step * -(-inner // step)
        if not size("num_experts") and size("shared_expert_intermediate_size"):
            inner = size("shared_expert_intermediate_size")
        found = self._wide(inner)
        biases = found.vectors and sum(rows for _, rows, _ in found.linears)
        return replace(found, vectors=biases + total(family.mlp, I=inner))

    def _wide(self, inner: int) -> LayerShape:
        """Return an MLP of some inner size; `vectors` is 1 if it has biases."""
        names = ["gate_proj", "up_proj"] if self.family.is_gated else ["up_proj"]
        inputs = [(name, inner, self.hidden) for name in names]
        if self.family.is_fused[1]:
            inputs = [("gate_up_proj", 2 * inner, self.hidden)]
        linears = (*inputs, ("down_proj", self.hidden, inner))
        # Without a gate, half as much is kept: the input and the result of the activation function.
        width = inner if self.family.is_gated else inner // 2
        return LayerShape(linears, int(bool(self.found.get(self.family.biases[2]))), inner=width)

    def _mixture(self) -> LayerShape:
        """Return a mixture of experts."""
        size, hidden, found = self.size, self.hidden, self.found
        count, active = size("num_experts"), size("num_experts_per_tok", 2)
        inner = size("moe_intermediate_size", size("intermediate_size"))
        shared = size("shared_expert_intermediate_size", size("num_shared_experts") * inner)
        matrices = 3 if self.family.is_gated else 2
        zero = size("zero_expert_num")  # experts that return their input; transformers allocates projections for them
        weights = matrices * hidden * inner * count + 2 * hidden * inner * zero
        vectors = hidden * (count + zero) + total(self.family.router, H=hidden, E=count)
        if found.get("experts_biased"):
            weights += count * (2 * inner + hidden)
            vectors += count
        part = self._wide(shared) if shared else LayerShape(())
        linears = part.linears
        if found["model_type"] == "minimax_m3_vl_text":
            linears = (("gate_up_proj", 2 * shared, hidden), ("down_proj", hidden, shared))
        if found.get("shared_gate"):
            linears = (*linears, ("shared_expert_gate", 1, hidden))
        width = inner if self.family.is_gated else inner // 2
        experts = Experts(count, active, width, shared, weights)
        return LayerShape(linears, vectors, experts, inner=part.inner)

    def _per_layer_inputs(self) -> Iterator[LayerShape]:
        """Return what adds an embedding of its own to each layer (Gemma 3n and 4), and the streams of Gemma 3n."""
        size, hidden = self.size, self.hidden
        if width := size("hidden_size_per_layer_input"):
            linears = (("per_layer_input_gate", width, hidden), ("per_layer_projection", hidden, width))
            yield LayerShape(linears, hidden)
        if rank := size("laurel_rank"):
            linears = (("linear_left", rank, hidden), ("linear_right", hidden, rank))
            streams = size("altup_num_inputs", 4)
            yield LayerShape(linears, 3 * hidden)
            predicted = (("prediction_coefs", streams**2, streams), ("correction_coefs", streams, streams))
            yield LayerShape((*predicted, ("modality_router", streams, hidden)))


def _merged(parts: list[LayerShape]) -> LayerShape:
    """Return a layer that has all of some parts."""
    return LayerShape(
        linears=tuple(one for part in parts for one in part.linears),
        vectors=sum(part.vectors for part in parts),
        experts=next((part.experts for part in parts if part.experts), None),
        attentions=tuple(one for part in parts for one in part.attentions),
        mixer=next((part.mixer for part in parts if part.mixer), None),
        inner=sum(part.inner for part in parts),
        norms=sum(part.norms for part in parts),
    )
