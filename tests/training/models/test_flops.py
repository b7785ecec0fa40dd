"""The operations of models: those that torch counts, with only the experts that compute a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from hpc_rl.plan.duration import operations
from hpc_rl.plan.shape import shape_of
from hpc_rl.training.models.attention.packed_attention import ATTENTION, register
from hpc_rl.training.models.causal_lm import CausalLM, Flops, count_flops
from tests.marks import since_5
from tests.plan.families import FEW_LAYERS, few_layers

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 5,
}


@since_5
@pytest.mark.parametrize(
    ("family", "settings", "layers"),
    [
        ("Qwen3Moe", {"num_experts_per_tok": 2}, 3),
        ("Qwen3Moe", {"num_experts_per_tok": 2, "mlp_only_layers": [1]}, 2),
        ("Mixtral", {"num_experts_per_tok": 2, "num_local_experts": 5, "intermediate_size": 24}, 3),
    ],
)
def test_idle_experts_do_not_count(family: str, settings: dict[str, Any], layers: int) -> None:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(config)
    embeddings = {id(layer.weight) for layer in (hf.get_input_embeddings(), hf.get_output_embeddings())}
    parameters = sum(one.numel() for one in hf.parameters() if id(one) not in embeddings)
    idle = layers * 3 * (3 * 64 * 24)
    assert count_flops(CausalLM(hf)).per_token == pytest.approx(6 * (parameters - idle))


def attend(
    _module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _options: Any
) -> torch.Tensor:
    """Multiply queries with all keys, and the products with all values: FlopCounterMode counts these two."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return (query @ key.transpose(2, 3) @ value).transpose(1, 2)


OFTEN = {"deepseek_v3", "falcon_h1", "nemotron_h", "qwen3_5_text"}


@since_5
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in OFTEN else [pytest.mark.long])
        for kind in FEW_LAYERS
        if kind != "longcat_flash"  # its routers have experts without weights, which need values
    ],
)
def test_operations_are_those_that_torch_counts(kind: str) -> None:
    """Of a forward pass, without computing it: transformers' own code on the meta device, with layers of real widths.
    The plan and perf/mfu differ in the LM head, which computes all tokens here."""
    length, settings = 512, few_layers(kind)
    register()
    config = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, experts_implementation="batched_mm"
        )
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            hf(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False, attend=attend)
    counted = counter.get_total_flops()
    measured = count_flops(CausalLM(hf)).of([length], length) / 3
    planned = operations(shape_of(config.to_dict(), kind), length, length, 1, 1)
    print(f"  {kind}: perf/mfu {measured / counted - 1:+.1%}, plan {planned / counted - 1:+.1%}")
    assert measured == pytest.approx(counted, rel=0.1)
    assert planned == pytest.approx(counted, rel=0.1)


def test_attention_in_windows() -> None:
    flops = Flops(1.0, 1.0, 10.0, windows=((4, 100.0),))
    assert flops.of([3, 6], 2) == 9 + 2 + 10 * (9 + 36) + 100 * (9 + 24)
