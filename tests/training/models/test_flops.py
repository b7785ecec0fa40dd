"""The operations of mixtures of experts: only experts that compute a token count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hpc_rl.training.models.causal_lm import CausalLM, count_flops
from tests.marks import since_5

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
