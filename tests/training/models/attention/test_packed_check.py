"""A model whose packed rows are not what its samples are alone is refused, whatever its settings are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rl.config.training.common import ModelConfig, TrainingConfig
from hpc_rl.errors import UserError
from hpc_rl.formats import model_families
from hpc_rl.probes.tiny_model import make_tiny_model
from hpc_rl.training.models.attention import packed_attention, packed_check
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.scalar_model import critic
from hpc_rl.training.parallel.distributed import World
from tests.marks import since_5
from tests.training.models.attention.test_packed_attention import spread_sinks

WORLD = World(0, 1, torch.device("cpu"))
CAPPED = {"final_logit_softcapping": 0.05}


def load(folder: Path, kind: str, dtype: str = "float32", **settings: Any) -> CausalLM:
    path = str(make_tiny_model(folder, kind=kind, **settings))
    return load_sharded(causal_lm(ModelConfig(path=path, dtype=dtype)), WORLD, TrainingConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2", {}),
        ("llama", {"layers": 16, "hidden": 128}),
        ("mistral", {"sliding_window": 6}),
        ("gemma2", {**CAPPED, "attn_logit_softcapping": 0.02, "sliding_window": 6}),
        ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "layers": 8}),
        ("gpt_oss", {"num_attention_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6}),
    ],
)
def test_models_that_are_right_are_loaded(tmp_path: Path, kind: str, settings: dict[str, Any], dtype: str) -> None:
    model = load(tmp_path, kind, dtype, **settings)
    spread_sinks(model.hf)
    packed_check.check_packing(model, WORLD)
    assert model.hf.training and "forward" not in vars(model)
    assert model.hf.config._attn_implementation == packed_attention.ATTENTION


@since_5
def test_a_model_with_another_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings name neither its layers nor its cap as other families do."""
    monkeypatch.setattr(model_families, "REFUSALS", {})  # as for a family that is not named there
    with pytest.raises(UserError, match="recurrent_gemma cannot be trained in packed rows"):
        load(tmp_path, "recurrent_gemma", lru_width=32, attention_window_size=8, num_key_value_heads=1, layers=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_attention_over_the_whole_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, dtype: str
) -> None:
    bounds = packed_attention.SampleBounds
    one = lambda lengths, _starts, sequence: bounds((sum(lengths),), torch.tensor([0, sum(lengths)]).int(), sequence)  # noqa: E731
    monkeypatch.setattr(packed_attention, "SampleBounds", one)
    path = str(make_tiny_model(tmp_path, layers=4))
    config = ModelConfig(path=path, dtype=dtype)  # type: ignore[arg-type]
    pretrained: Any = causal_lm(config) if role == "policy" else critic(path, config)
    with pytest.raises(UserError, match="qwen2 cannot be trained in packed rows: the hidden states"):
        load_sharded(pretrained, WORLD, TrainingConfig())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_that_the_loss_would_not_compute_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(packed_check, "softcap_of", lambda _hf: None)
    with pytest.raises(UserError, match="gemma2 change their logits in a way that the chunked loss does not compute"):
        load(tmp_path, "gemma2", dtype, **CAPPED)
