"""Parts of a plan against what the same code allocates on a CPU: layers with a state, as transformers computes them in
bfloat16 without kernels, and the loss of distillation. tests/simulated_gpu compares whole steps."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_rl.algorithms.divergences import DIVERGENCES
from hpc_rl.formats.model_kind import MIXERS
from hpc_rl.plan.shape import shape_of
from hpc_rl.training.models.distill_head import Terms, distillation_sum, live

_PLAIN = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 32}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64},
    **{"linear_value_head_dim": 32, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
}
_EXPERTS = {"num_experts": 2, "moe_intermediate_size": 32}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_chunk_size": 64}
SMALL: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA2},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 2},
    "jamba": {"mamba_dt_rank": 8, "num_experts": 2},
    "kimi_linear": {**_EXPERTS, "linear_num_heads": 2, "linear_head_dim": 64},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"]},
    "minimax": {"head_dim": 32, "block_size": 64, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 64},
        "hybrid_override_pattern": "M*",
    },
    "olmo_hybrid": {**_DELTA, "linear_num_value_heads": 2, "linear_value_head_dim": 128},
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, **_EXPERTS},
}


class Traced(TorchDispatchMode):
    """Counts the bytes of all tensors that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._bytes:
                    self._bytes[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._freed, storage._cdata)
        return out

    def _freed(self, key: int) -> None:
        self.live -= self._bytes.pop(key)


def kept(mixer: torch.nn.Module, hidden: int, tokens: int) -> int:
    """Return the bytes that a mixer keeps of a sample, without its input and its result."""
    inputs = torch.zeros(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    named = {"attention_mask": None, "position_embeddings": None} if "Lightning" in type(mixer).__name__ else {}
    with Traced() as traced:
        normed = inputs * 1.0
        before = traced.live
        out = mixer(normed, **named)
        result = out[0] if isinstance(out, tuple) else out
        return traced.live - before - result.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", SMALL)
def test_activations_of_a_token(kind: str) -> None:
    pytest.importorskip("transformers.conversion_mapping", reason="other code in transformers 4")
    layers = {} if kind == "nemotron_h" else {"num_hidden_layers": 2}
    settings = {"model_type": kind, "vocab_size": 32, "pad_token_id": 0, "hidden_size": 64, **_PLAIN, **layers}
    settings |= SMALL[kind]
    config = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(config)
    mixer = next(part for part in hf.modules() if type(part).__name__ == MIXERS[kind])
    mixer = mixer.to_empty(device="cpu").to(torch.bfloat16).train()
    for weight in mixer.parameters():
        weight.data.zero_()
    few, many = (64, 128) if kind == "jamba" else (128, 256)  # Jamba's code computes one token after the other
    per_token = (kept(mixer, 64, many) - kept(mixer, 64, few)) / (many - few)
    planned = next(layer.mixer for layer in shape_of(settings, kind).layers if layer.mixer)
    assert planned.kept == pytest.approx(per_token, rel=0.05)


@pytest.mark.parametrize(("student", "teacher"), [(None, None), (30.0, None), (None, 30.0), (30.0, 30.0)])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("divergence", list(DIVERGENCES))
def test_the_loss_of_distillation(
    divergence: str, temperature: float, student: float | None, teacher: float | None
) -> None:
    """A chunk is a quarter of another loss's, and the plan has three matrices of that size, and one more with a cap."""
    positions, vocabulary, hidden = 16, 5000, 8
    inputs, weight = (torch.zeros(n, hidden, requires_grad=True) for n in (positions, vocabulary))
    targets = torch.zeros(positions, dtype=torch.int64)
    with Traced() as traced:
        teaching = live(inputs.detach(), weight.detach(), temperature, None, teacher)
        terms = Terms(divergence, 0.5, temperature, 0.1)
        distillation_sum(inputs, weight, targets, teaching, terms, softcap=student)
    matrices = (traced.peak - 4 * vocabulary * hidden) / (4 * positions * vocabulary)
    assert matrices <= 4 * (3 + (student is not None))
