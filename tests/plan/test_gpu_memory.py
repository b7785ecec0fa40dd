"""The memory of one model, by hand, for a shape whose sizes are all different. tests/simulated_gpu compares whole jobs
with what simulated GPUs trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_rl.config.training.common import Offload
from hpc_rl.plan.gpu_memory import ShardedModel, largest
from hpc_rl.plan.shape import Shape, shape_of

H, INNER, L, Q, K, V, T = 64, 160, 3, 96, 32, 5000, 1000
SIZES = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_hidden_layers": L,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": V,
}


def sized(**sizes: int) -> Shape:
    """Return the shape of a model with some other sizes."""
    return shape_of(SIZES | sizes, "m")


SHAPE = sized()
LAYER = 2 * H * (Q + K) + 3 * H * INNER + 2 * H
ROOT = 2 * V * H + H
TOTAL = L * LAYER + ROOT
MODEL = ShardedModel(SHAPE, itemsize=4, head="loss", sharding="full", shards=8, recompute=True)
CHUNK = 4 * V * T
"""All logits fit into one chunk."""


def test_states() -> None:
    assert SHAPE.total == TOTAL
    assert (MODEL.weights, MODEL.moments, MODEL.states) == (4 * TOTAL / 8, 8 * TOTAL / 8, 12 * TOTAL / 8)
    assert replace(MODEL, itemsize=2).states == 6 * TOTAL / 8
    rounded = replace(MODEL, saved=1000.0)
    assert (rounded.weights, rounded.moments) == (4 * TOTAL / 8, (8 * TOTAL - 2000) / 8)
    frozen = replace(MODEL, trained=False, itemsize=2)
    assert (frozen.weights, frozen.moments) == (2 * TOTAL / 8, 0)
    adapted = replace(MODEL, adapters=999, itemsize=2)
    assert (adapted.weights, adapted.moments) == ((2 * TOTAL + 4 * 999) / 8, 8 * 999 / 8)


def test_what_waits_in_host_memory() -> None:
    def of(offload: Offload) -> tuple[float, float, float]:
        found = replace(MODEL, offload=offload)
        return found.computing, found.waiting, found.on_host

    part = TOTAL / 8
    assert of("none") == (12 * part, 12 * part, 0)
    assert of("optimizer") == (4 * part, 4 * part, 8 * part)
    assert of("all") == (4 * part, 0, 12 * part)
    packed = replace(MODEL, adapters=8, itemsize=2, four_bit=True, offload="all")
    assert packed.waiting == pytest.approx(L * (LAYER - 2 * H) * (4 + 1 / 8 + 1 / 512) / 8)
    assert packed.on_host == pytest.approx(packed.states - packed.waiting)
    frozen = replace(MODEL, trained=False, itemsize=2, offload="all")
    assert (frozen.computing, frozen.waiting, frozen.on_host) == (2 * part, 0, 2 * part)


def test_moments_come_back_in_parts_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replace(MODEL, head="value", offload="optimizer", shards=1, itemsize=4)
    few = replace(alone, shape=sized(vocab_size=10))
    found = few.update(1)
    assert found == {"gradients": 4 * few.total, "moments": 8 * few.total}
    monkeypatch.setattr("hpc_rl.plan.gpu_memory.OFFLOAD_BYTES", 3 * few.total)
    assert few.update(1) == {"gradients": 4 * few.total, "moments": 6 * few.total}
    assert "moments" not in replace(few, offload="none").update(1)


def test_a_critic_has_one_output_instead_of_the_head() -> None:
    critic = replace(MODEL, head="value")
    assert critic.total == L * LAYER + V * H + 2 * H
    assert critic.root == V * H + 2 * H


def test_weights_in_four_bits_are_whole_on_each_rank() -> None:
    packed = L * (LAYER - 2 * H)
    found = replace(MODEL, adapters=8, itemsize=2, four_bit=True).weights - 4 * 8 / 8
    assert found == pytest.approx(packed * (4 + 1 / 8 + 1 / 512) / 8 + 2 * (TOTAL - packed) / 8)


def test_forward() -> None:
    inside = {"gathered weights": 2 * (ROOT + 2 * LAYER), "activations": 2 * T * (3 * INNER + 4 * H)}
    assert replace(MODEL, head="value").forward(T) == {
        "gathered weights": 2 * (V * H + 2 * H + 2 * LAYER),
        "activations": inside["activations"],
    }
    found = replace(MODEL, head="logprobs").forward(T)
    assert found == {"gathered weights": inside["gathered weights"], "logits": CHUNK, "activations": 8 * T * H}
    narrow = sized(vocab_size=10)
    assert "logits" not in replace(MODEL, shape=narrow, head="logprobs").forward(T)


def test_update_in_the_head() -> None:
    """Gradients of earlier micro-batches, the loss with the gradient of its logits, and one hidden state per layer."""
    assert MODEL.update(T) == {
        "gradients": 4 * TOTAL / 8,
        "gathered weights": 2 * (ROOT + LAYER),
        "saved activations": L * 2 * T * H,
        "activations": 12 * T * H,
        "logits": 1.5 * CHUNK,
        "gradients of the head": 4 * V * H,
    }
    assert replace(MODEL, head="logprobs").update(T)["logits"] == 3 * CHUNK


def test_update_in_a_layer() -> None:
    wide = sized(intermediate_size=5000, vocab_size=10)
    layer, root = 2 * H * (Q + K) + 3 * H * 5000 + 2 * H, 2 * 10 * H + H
    found = replace(MODEL, shape=wide).update(T)
    assert found == {
        "gathered weights": 2 * (root + 2 * layer),
        "gradients": 4 * (L * layer + root) / 8 + 4 * layer + 2 * H * 5000,
        "gradients of the head": 2 * 10 * H,
        "saved activations": L * 2 * T * H,
        "activations": 2 * T * (8 * 5000 + 10 * H + 2 * Q + 2 * K),
    }
    kept = replace(MODEL, shape=wide, recompute=False).update(T)
    assert kept["saved activations"] == L * (2 * T * (8 * H + 4 * 5000 + 2 * Q + 2 * K) + 4 * T * 6)
    assert kept["activations"] == 2 * T * (4 * 5000 + 5 * H)


WIDE = sized(intermediate_size=5000, vocab_size=10)
KEPT = 2 * T * (8 * H + 4 * 5000 + 2 * Q + 2 * K) + 4 * T * 6
"""Activations of a layer of this shape that is not computed again."""
AGAIN, ONCE = 2 * T * (8 * 5000 + 10 * H + 2 * Q + 2 * K), 2 * T * (4 * 5000 + 5 * H)
"""What its backward pass needs beside them."""


def test_every_second_layer_is_computed_again() -> None:
    """Of three layers, the first and the last; of four, the first and the third."""
    half = replace(MODEL, shape=WIDE, recompute="half")
    found = half.update(T)
    assert (found["saved activations"], found["activations"]) == (KEPT + 2 * 2 * T * H, AGAIN)
    even = replace(half, shape=sized(intermediate_size=5000, vocab_size=10, num_hidden_layers=4)).update(T)
    assert (even["saved activations"], even["activations"]) == (2 * KEPT + 2 * 2 * T * H, ONCE)
    one = replace(half, shape=sized(intermediate_size=5000, vocab_size=10, num_hidden_layers=1)).update(T)
    assert (one["saved activations"], one["activations"]) == (2 * T * H, AGAIN)


def test_a_layer_before_the_last_one_may_need_the_most() -> None:
    """Attention of many heads keeps much, but not what the backward pass of an MLP needs."""
    shape = sized(vocab_size=10, num_hidden_layers=2, intermediate_size=5000, hidden_size=1, head_dim=1)
    half = replace(MODEL, shape=shape, recompute="half", head="value")
    assert half.update(T)["activations"] == 2 * T * (4 * 5000 + 5)
    experts = sized(vocab_size=10, num_hidden_layers=2, intermediate_size=5000, hidden_size=9000, head_dim=1)
    found = replace(half, shape=experts).update(T)
    assert found["saved activations"] == 2 * T * 9000 + 2 * T * (8 * 9000 + 4 * 5000 + 16) + 4 * T * 6


def test_inputs_in_host_memory() -> None:
    host = replace(MODEL, shape=sized(num_hidden_layers=7), inputs_on_host=True)
    assert host.update(T)["saved activations"] == 2 * 2 * T * H
    assert replace(host, shape=sized(num_hidden_layers=1)).update(T)["saved activations"] == 2 * T * H
    # 2 x 1000 x 64 bytes are a bit less than 2^17.
    assert host.inputs(T) == (1 << 17, 7)
    assert host.inputs(1024) == (1 << 17, 7)
    assert host.inputs(1025) == (1 << 18, 7)
    assert replace(host, trained=False).inputs(T) == (0, 0)
    assert replace(host, inputs_on_host=False).inputs(T) == (0, 0)


def test_update_at_the_end() -> None:
    """With few tokens, the gradients of a large vocabulary are the most: bfloat16, float32, and this rank's part."""
    large = sized(vocab_size=10**6)
    root = 2 * 10**6 * H + H
    found = replace(MODEL, shape=large).update(1)
    total = L * LAYER + root
    assert found == {"gradients": 4 * total / 8, "gradients of embedding and head": 6 * root + 4 * root / 8}


def test_adapters_need_no_gradients_of_the_model() -> None:
    wide = sized(intermediate_size=5000)
    layer = 2 * H * (Q + K) + 3 * H * 5000 + 2 * H
    found = replace(MODEL, shape=wide, adapters=900, itemsize=2).update(T)
    assert found["gradients"] == 4 * 900 / 8 + 4 * 900 / L
    assert "gradients of the head" not in found
    assert found["gathered weights"] == 2 * (ROOT + 2 * (layer + 900 / L))
    in_head = replace(MODEL, adapters=900, itemsize=2, recompute=False).update(T)
    assert in_head["saved activations"] == L * (2 * T * (6 * H + 4 * INNER + 2 * Q + 2 * K) + 4 * T * 6)
    assert "gradients of the head" not in in_head


@pytest.mark.parametrize("sharding", ["gradients", "none"])
def test_whole_gradients_and_gathered_weights(sharding: str) -> None:
    found = replace(MODEL, sharding=sharding).update(T)  # type: ignore[arg-type]
    assert found["gathered weights"] == 2 * (ROOT + L * LAYER)
    assert found["gradients"] >= 4 * TOTAL


def test_logits_are_computed_in_chunks_of_equal_size() -> None:
    """2^30 bytes hold 2,097 rows of 128,000 float32 numbers: 5,000 positions are 3 chunks of 1,667."""
    shape = sized(vocab_size=128_000)
    assert replace(MODEL, shape=shape, head="logprobs").forward(5000)["logits"] == 4 * 128_000 * 1667


def test_start_of_a_pass() -> None:
    """With few tokens, the weights outside of the layers exist twice while they are gathered."""
    large = sized(vocab_size=10**6)
    root = 2 * 10**6 * H + H
    found = replace(MODEL, shape=large, head="logprobs").forward(1)
    assert found == {"gathered weights": 4 * (root + LAYER)}
    adapted = replace(MODEL, shape=large, adapters=900, itemsize=2).update(1)
    assert adapted == {"gathered weights": 4 * (root + LAYER + 900 / L), "gradients": 4 * 900 / 8}


def test_largest_moment_without_empty_parts() -> None:
    assert largest({"a": 3.0, "b": 0.0}, {"c": 2.0}) == {"a": 3.0}


def test_ranks_that_share_rows_keep_the_result_of_attention_twice() -> None:
    shared = replace(MODEL, split=2, recompute=False)
    kept = replace(MODEL, recompute=False).update(T)["saved activations"]
    assert shared.update(T)["saved activations"] == kept + L * 2 * T * Q
    # Three ranks cannot share 2 key heads, so that each head is repeated three times.
    assert replace(shared, split=3).update(T)["saved activations"] == kept + L * 2 * T * (Q + 2 * 2 * K)


def test_experts_are_gathered_beside_weights_in_four_bits() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    shape = sized(**experts)
    assert shape.largest.parameters - 2 * H * (Q + K) > 3 * 4 * 20 * H
    packed = replace(MODEL, shape=shape, adapters=8 * L, itemsize=2, four_bit=True)
    assert packed._layer() == 8 + shape.largest.parameters - 2 * H * (Q + K)
    with_usual = replace(packed, shape=sized(**experts, num_dense_layers=1), offload="all")
    assert with_usual._layer() == packed._layer(), "a layer with a usual MLP gathers less"
    assert with_usual.waiting == pytest.approx((L * 2 * H * (Q + K) + 3 * H * INNER) * (4 + 1 / 8 + 1 / 512) / 8)
