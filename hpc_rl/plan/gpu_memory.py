"""The memory that one model takes on one GPU: what it holds all the time, and its peaks when it computes.

A peak is the largest of a few moments. Each moment is a sum of parts with a name, so that a plan can show its
arithmetic. The factors are the tensors that a step of this project allocates, with FSDP2 and transformers' layers;
tests/simulated_gpu traces them. Shape suffixes: T tokens of a micro-batch, H hidden size, I inner size of the MLP,
Q all query heads, K all key heads, V vocabulary, C positions of one chunk of logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from hpc_rl.config.training.common import OFFLOAD_BYTES, Offload, Recompute, Sharding, recomputed_layers
from hpc_rl.plan.layers import AttentionShape, LayerShape
from hpc_rl.plan.shape import Shape

COMPUTE = 2
"""Bytes of a number in bfloat16, in which GPUs compute."""
FLOAT32 = 4
SCORE_BYTES = 256 << 20
"""Bytes of float32 scores of one block of queries (hpc_rl.training.models.attention.exact_attention)."""
CHUNK_BYTES = 1 << 30
"""Bytes of float32 logits in one chunk (hpc_rl.training.models.lm_head)."""

Parts = dict[str, float]
"""Name -> bytes, of everything that exists at one moment."""
Head = Literal["loss", "logprobs", "value"]
"""What a model computes from its last hidden states: a cross-entropy, log-probabilities, or one number."""


@dataclass(frozen=True)
class ShardedModel:
    """A model that ranks hold in parts."""

    shape: Shape
    itemsize: int
    """Bytes of a weight."""
    head: Head
    sharding: Sharding
    shards: int
    """Number of ranks that together hold the model once."""
    trained: bool = True
    recompute: Recompute = False
    """Which layers are computed again in the backward pass."""
    inputs_on_host: bool = False
    """Whether the inputs of recomputed layers wait in host memory."""
    adapters: int = 0
    """Parameters of the adapters that are trained instead of the model."""
    saved: float = 0.0
    """Bytes that 8 bits save in each of AdamW's two moments, over all ranks that hold the model once."""
    four_bit: bool = False
    """Whether the weights of the layers' linear maps are in 4 bits, whole on each rank."""
    offload: Offload = "none"
    """What waits in host memory while nothing uses it."""
    split: int = 1
    """Number of ranks that compute a row together. Tokens are those of one rank's slice."""
    ranks: int = 2
    """Number of all ranks that have the model. A single rank with `sharding` none uses no FSDP."""
    beside_head: float = 0.0
    """Bytes of weights that a teacher has gathered while the head computes."""
    longest: int = 0
    """Most tokens of a sample, which a layer with a state computes at a time; 0 for those of a row."""

    @property
    def total(self) -> int:
        """Parameters without adapters."""
        return self.shape.total_as_classifier if self.head == "value" else self.shape.total

    @property
    def root(self) -> int:
        """Parameters outside of the layers: embedding, last norm and LM head."""
        return self.total - self.shape.blocks

    @property
    def is_alone(self) -> bool:
        """Whether the model computes with copies of its float32 weights instead of gathered ones."""
        return self.ranks == 1 and self.sharding == "none"

    @property
    def weights(self) -> float:
        """Bytes of a rank's weights and adapters."""
        own = FLOAT32 * self.adapters / self.shards if self.trained else 0
        return self._base() + own

    @property
    def changed(self) -> int:
        """Bytes of all weights that the optimizer changes."""
        return FLOAT32 * self.adapters or self.itemsize * self.total

    @property
    def moments(self) -> float:
        """Bytes of a rank's moments of AdamW."""
        if not self.trained:
            return 0.0
        return 2 * (self.changed - self.saved) / self.shards

    @property
    def states(self) -> float:
        """Bytes of a rank's weights and moments."""
        return self.weights + self.moments

    @property
    def computing(self) -> float:
        """Bytes that a rank holds on the GPU while the model computes, without activations and gathered weights."""
        return self.states if self.offload == "none" else self.weights

    @property
    def waiting(self) -> float:
        """Bytes that a rank holds on the GPU while others compute. Weights in 4 bits stay there."""
        return self._packed() if self.offload == "all" else self.computing

    @property
    def on_host(self) -> float:
        """Bytes of host memory in which a rank keeps what is not on the GPU."""
        return {"none": 0.0, "optimizer": self.moments, "all": self.states - self._packed()}[self.offload]

    @property
    def gathered_root(self) -> float:
        """Bytes of the weights outside of the layers while they are gathered."""
        return 0.0 if self.is_alone else COMPUTE * self.root

    def inputs(self, tokens: int) -> tuple[int, int]:
        """Return the bytes of a block of host memory that holds a layer's input, and the number of such blocks per
        rank. torch rounds page-locked memory up to a power of two."""
        if not (self.trained and self.inputs_on_host):
            return 0, 0
        return 1 << (COMPUTE * tokens * self._input - 1).bit_length(), len(self._recomputed)

    def forward(self, tokens: int) -> Parts:
        """Return the peak of a pass without gradients over so many tokens."""
        shape, gathered = self.shape, self._gathered()
        per_H = COMPUTE * tokens * shape.hidden
        inside = [gathered | self._forward_of(layer, tokens) for layer, _ in shape.kinds]
        if self.head == "value":
            return largest(self._at_start(), *inside)
        logits = self._chunk(tokens)
        return largest(self._at_start(), *inside, gathered | {"logits": logits, "activations": 4 * per_H})

    def update(self, tokens: int) -> Parts:
        """Return the peak of forward pass, backward pass and optimizer step, with so many tokens in a micro-batch."""
        start = self._at_start() | {"gradients": self._gradients()}
        inside = [moment for number in self._last() for moment in self._in_layer(tokens, number)]
        moments = [start, self._at_head(tokens), *inside, self._at_end()]
        if self.offload != "none":
            moments.append({"gradients": self._gradients(), "moments": min(self.moments, 2.0 * OFFLOAD_BYTES)})
        return largest(*moments)

    def _base(self) -> float:
        """Return the bytes of a rank's weights without adapters."""
        divided = self.total - self._packed_weights() if self.four_bit else self.total
        return self._packed() + self.itemsize * divided / self.shards

    def _packed_weights(self) -> int:
        return sum(count * layer.in_linears for layer, count in self.shape.kinds)

    def _packed(self) -> float:
        """Return the bytes of weights in 4 bits, which each rank holds whole, with their scales: 4 + 8 / 64 +
        32 / (64 x 256) bits (https://arxiv.org/abs/2305.14314)."""
        return self._packed_weights() * (4 + 8 / 64 + 32 / (64 * 256)) / 8 if self.four_bit else 0.0

    def _gathered(self) -> Parts:
        """Return the weights that FSDP has gathered while a layer computes: that layer and the next one."""
        if self.is_alone:
            converted = self.total - (self._packed_weights() if self.four_bit else 0)
            return {"weights in bfloat16": COMPUTE * (self.adapters + (converted if self.itemsize == FLOAT32 else 0))}
        if self.sharding in ("full", "hybrid"):
            return {"gathered weights": COMPUTE * (self.root + self._two_layers())}
        packed = self._packed_weights() if self.four_bit else 0
        return {"gathered weights": COMPUTE * (self.root + self.adapters + self.shape.blocks - packed)}

    def _at_start(self) -> Parts:
        """Return what exists when FSDP gathers embedding, head and first layer: what arrives, and its copy."""
        if self.is_alone:
            return self._gathered()
        return {"gathered weights": 2 * COMPUTE * (self.root + self._layer())}

    def _layer(self) -> float:
        """Return the parameters of the largest layer that FSDP gathers."""
        return max(self._gathered_of(layer) for layer, _ in self.shape.kinds)

    def _two_layers(self) -> float:
        """Return the parameters of the largest two neighbours that FSDP gathers."""
        sizes = [self._gathered_of(layer) for layer in self.shape.layers]
        return max(map(sum, zip(sizes, [*sizes[1:], sizes[0]], strict=True)))

    def _gathered_of(self, layer: LayerShape) -> float:
        own = self.adapters / len(self.shape.layers)
        return own + layer.parameters - (layer.in_linears if self.four_bit else 0)

    @property
    def _recomputed(self) -> range:
        """The numbers of the layers that are computed again."""
        return recomputed_layers(self.recompute, len(self.shape.layers))

    def _last(self) -> Iterator[int]:
        """Yield the numbers of the last layer of each kind that is computed again, and of each that is not: a layer may
        keep its activations while the one before it is computed again."""
        found = {}
        for number, layer in enumerate(self.shape.layers):
            found[id(layer), number in self._recomputed] = number
        yield from found.values()

    @property
    def _input(self) -> int:
        """The numbers of a token between layers."""
        return self.shape.streams or self.shape.hidden

    def _saved(self, tokens: int, layers: int) -> float:
        """Return the activations that so many of the first layers, and what is before and after all, keep for the
        backward pass."""
        again = sum(number < layers for number in self._recomputed)
        on_gpu = min(again, 2) if self.inputs_on_host else again
        kept = {id(layer): self._kept(layer, tokens) for layer, _ in self.shape.kinds}
        whole = (kept[id(layer)] for number, layer in enumerate(self.shape.layers[:layers]) if not self._again(number))
        outside = 4 * self.shape.streams + 5 * self.shape.layer_inputs
        return COMPUTE * tokens * (on_gpu * self._input + outside) + sum(whole)

    def _again(self, number: int) -> bool:
        return number in self._recomputed

    def _kept(self, layer: LayerShape, tokens: int) -> float:
        """Return the activations that a layer keeps if it is not computed again."""
        # The gradient of a norm's weight needs the norm's result, which adapters do not.
        numbers = (3 if self.adapters else 4) * layer.norms * self.shape.hidden + 4 * layer.working_inner
        # The experts' inputs, and their results, which the gradients of routers need.
        numbers += 2 * self._routed(layer)
        sums = FLOAT32 * tokens * sum(one.heads for one in layer.attentions)
        return COMPUTE * tokens * numbers + sums + self._mixed(layer, tokens)

    def _mixed(self, layer: LayerShape, tokens: int) -> float:
        """Return what attention, a mixer and streams keep."""
        numbers = 8 * self.shape.streams + sum(self._attention(one) for one in layer.attentions)
        return COMPUTE * tokens * numbers + (layer.mixer.kept * tokens if layer.mixer else 0)

    def _routed(self, layer: LayerShape) -> int:
        """Return the width of a token's copies, one for each expert that computes it; 0 without experts."""
        return layer.experts.active * self.shape.hidden if layer.experts else 0

    def _attention(self, attention: AttentionShape) -> int:
        """Return the width of what attention keeps for one token: its inputs and its result. Ranks that share rows have
        the result twice, before and after they exchange it, and repeated keys and values. A norm of queries and keys
        keeps its input in float32 and, for the gradient of its weight, its result."""
        queries, keys, result = attention.queries, attention.keys, attention.result
        normed = (2 if self.adapters else 3) * (queries + keys) if attention.is_normed else 0
        normed += attention.compressed + (2 * result if attention.is_multiplied else 0)
        if self.split == 1:
            return queries + result + keys + attention.values + normed
        times = math.lcm(attention.key_heads, self.split) // attention.key_heads
        return queries + 2 * result + times * (keys + attention.values) + normed

    def _chunk(self, tokens: int) -> float:
        rows = FLOAT32 * self.shape.vocabulary
        limit = max(1, CHUNK_BYTES // rows)
        return float(rows * -(-tokens // -(-tokens // limit)))

    def _at_head(self, tokens: int) -> Parts:
        """Return what exists when the head computes the gradient of its weight."""
        shape = self.shape
        whole = self.sharding in ("gradients", "none")
        gathered = self._gathered() if whole else {"gathered weights": COMPUTE * (self.root + self._layer())}
        found = gathered | {
            "gradients": self._gradients(),
            "saved activations": self._saved(tokens, len(shape.layers)),
            "activations": 6 * COMPUTE * tokens * shape.hidden,
            "gathered weights of the teacher": self.beside_head,
        }
        if self.head == "value":
            return found
        trains_head = not self.adapters
        return found | {
            "logits": ((1.5 if self.head == "loss" else 3.0) + shape.has_cap) * self._chunk(tokens),
            "gradients of the head": FLOAT32 * shape.embedding if trains_head else 0,
        }

    def _in_layer(self, tokens: int, number: int) -> Iterator[Parts]:
        """Yield what exists in the backward pass of a layer's MLP, and in that of its mixer."""
        shape, layer = self.shape, self.shape.layers[number]
        again = self._again(number)
        mixed = self._mixed(layer, tokens) if again else 0.0
        trains_head = self.head != "value" and not self.adapters
        beside = self._gathered() | {
            "gradients": self._gradients() + self._travelling(layer),
            "gradients of the head": COMPUTE * shape.embedding if trains_head else 0,
            "saved activations": self._saved(tokens, number + 1),
        }
        numbers = (8 if again else 4) * layer.working_inner + (10 if again else 5) * shape.hidden + 2 * shape.streams
        numbers += 4 * max(0, layer.norms - 2) * shape.hidden if again else 0
        numbers += (6 if again else 4) * self._routed(layer)
        yield beside | {"activations": COMPUTE * tokens * numbers + mixed}
        numbers = (6 if again else 3) * shape.hidden
        if layer.mixer:
            working = layer.mixer.working * self._sample(tokens)
            yield beside | {"activations": COMPUTE * tokens * numbers + mixed + working}
        if layer.attentions and shape.has_scores:
            numbers += max(one.queries + one.keys + one.values + one.result for one in layer.attentions)
            activations = COMPUTE * tokens * numbers + mixed
            yield beside | {"activations": activations, "scores of attention": self._scores(tokens)}

    def _forward_of(self, layer: LayerShape, tokens: int) -> Parts:
        """Return what exists while a layer computes a pass without gradients."""
        per_H = COMPUTE * tokens * self.shape.hidden
        own = COMPUTE * tokens * (3 * layer.working_inner + 4 * self._routed(layer))
        mixer = layer.mixer.forward * self._sample(tokens) if layer.mixer else 0
        return {"activations": max(own, mixer) + 4 * per_H, "scores of attention": self._scores(tokens)}

    def _sample(self, tokens: int) -> int:
        """Return the most tokens of a sample in a row."""
        return min(tokens, self.longest or tokens)

    def _scores(self, tokens: int) -> float:
        """Return what soft-capped scores or sinks need for a block of queries: assumed, six times its scores."""
        if not self.shape.has_scores:
            return 0.0
        return 6.0 * min(SCORE_BYTES, FLOAT32 * self.shape.heads * self._sample(tokens) ** 2)

    def _at_end(self) -> Parts:
        """Return what exists when the gradients of embedding and head travel, after the backward pass."""
        trained = 0 if self.adapters else self.root
        if self.is_alone:
            gradients = {"gradients": self._gradients(), "gradients of embedding and head": 2 * COMPUTE * trained}
            return self._gathered() | gradients
        return {
            "gradients": self._gradients(),
            "gradients of embedding and head": (COMPUTE + FLOAT32) * trained + FLOAT32 * trained / self.shards,
        }

    def _gradients(self) -> float:
        """Return the gradients that are kept from one micro-batch to the next."""
        itemsize, trained = (FLOAT32, self.adapters) if self.adapters else (self.itemsize, self.total)
        if self.sharding in ("full", "hybrid") or self.is_alone:
            return itemsize * trained / self.shards
        return float(FLOAT32 * trained)

    def _travelling(self, layer: LayerShape) -> float:
        """Return the gradient of a layer while ranks exchange it, and that of the next one's first matrix."""
        if self.adapters:
            return FLOAT32 * self.adapters / len(self.shape.layers)
        first = COMPUTE * self.shape.hidden * layer.inner
        return first if self.is_alone else FLOAT32 * self.shape.largest.parameters + first


def largest(*moments: Mapping[str, float]) -> Parts:
    """Return the moment with the most bytes, without empty parts."""
    found = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in found.items() if size}
