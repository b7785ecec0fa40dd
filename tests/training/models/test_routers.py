"""The metrics of routers, against transformers' auxiliary loss and for any division of a batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.training.models.attention.packed_batch import PackedBatch, filler, pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, load_model
from hpc_rl.training.models.routers import router_metrics
from hpc_rl.training.parallel.distributed import World
from tests.helpers import make_tiny_model
from tests.marks import since_5

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 3},
}


def test_metrics_of_known_loads() -> None:
    """Two layers with three experts and two experts per token: of 6 tokens, one layer is even."""
    even, uneven = [[4.0, 4.0, 4.0], [2.0, 2.0, 2.0]], [[6.0, 6.0, 0.0], [3.0, 2.0, 1.0]]
    found = router_metrics(torch.tensor([even, uneven], dtype=torch.float64), 0.1)
    assert found["largest_load"] == pytest.approx(1.5)
    assert found["entropy"] == pytest.approx((1 + math.log(2) / math.log(3)) / 2)
    assert found["aux_loss"] == pytest.approx(0.1 * (2 + 3 * (3 / 6 + 2 / 6)) / 2)


def test_models_without_a_coefficient_have_no_auxiliary_loss() -> None:
    found = router_metrics(torch.ones(1, 2, 1, dtype=torch.float64), None)
    assert found == {"largest_load": 1.0, "entropy": 1.0}


def batch(lengths: list[int], seed: int) -> PackedBatch:
    generator = np.random.default_rng(seed)
    ids = [generator.integers(3, 300, length).astype(np.int32) for length in lengths]
    return pack_samples(ids, [np.arange(length) > 0 for length in lengths])


def update(model: CausalLM, *batches: PackedBatch) -> dict[str, float]:
    for one in batches:
        model(one, lambda hidden_NH, weight_VH: hidden_NH.sum()).backward()
    assert model.routers is not None
    return model.routers.take_metrics(ALONE)


@since_5
@pytest.mark.parametrize("kind", list(KINDS))
def test_auxiliary_loss_equals_that_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    folder = str(make_tiny_model(tmp_path, kind=kind, router_aux_loss_coef=0.02, **KINDS[kind]))
    model, row = load_model(ModelConfig(path=folder)), batch([23], 0)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    logits = plain(row.input_ids_T[None], output_router_logits=True).router_logits
    experts, active = logits[0].shape[-1], KINDS[kind].get("num_experts_per_tok")
    expected = np.mean([float(load_balancing_loss_func((one,), experts, active)) for one in logits])
    assert len(logits) == 2
    assert update(model, row)["aux_loss"] == pytest.approx(0.02 * expected, abs=1e-7)


@since_5
@pytest.mark.parametrize("recompute", [False, True])
def test_any_division_of_a_batch_gives_the_same(tmp_path: Path, recompute: bool) -> None:
    """Rows without samples, tokens that fill up a row, and passes without gradients do not count."""
    folder = str(make_tiny_model(tmp_path, kind="qwen3_moe", **KINDS["qwen3_moe"]))
    model = load_model(ModelConfig(path=folder, enable_gradient_checkpointing=recompute))
    whole = batch([9, 14, 6], 1)
    expected = update(model, whole)
    assert expected["largest_load"] > 1 and expected["entropy"] < 1
    ids = np.split(whole.input_ids_T.numpy(), np.cumsum(whole.lengths)[:-1])
    parts = [pack_samples([sample], [np.arange(len(sample)) > 0]) for sample in ids]
    with torch.no_grad():
        model(batch([30], 2), lambda hidden_NH, weight_VH: hidden_NH)
    assert update(model, parts[0], filler(), *parts[1:]) == pytest.approx(expected, abs=1e-6)
    longer = pack_samples([*ids, ids[0]], [np.arange(len(sample)) > 0 for sample in [*ids, ids[0]]])
    assert update(model, replace(longer, tokens=whole.tokens)) == pytest.approx(expected, abs=1e-6)
    assert model.routers is not None and model.routers.take_metrics(ALONE) == {}


def test_dense_models_have_no_routers(tmp_path: Path) -> None:
    assert load_model(ModelConfig(path=str(make_tiny_model(tmp_path)))).routers is None
