"""Compiled layers are whole graphs for any number of samples in a row, with the numbers of plain layers.

Tracing and the division into a forward and a backward graph are torch.compile's own. The backend runs the graphs as
they are, because producing machine code takes minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hpc_rl.config.training import ModelConfig
from hpc_rl.training.distributed import World
from hpc_rl.training.models.causal_lm import CausalLM, load_model
from hpc_rl.training.models.packed_batch import PackedBatch, pack_samples
from tests.helpers import make_tiny_model
from tests.marks import long

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
ROWS = ([3, 6, 5, 3], [19], [4] * 9)
"""Lengths of samples. The first numbers of samples and tokens are not among the sizes of the models: they would be
traced as these sizes, and once again as numbers of their own."""
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_hidden_layers": 1}
"""Of models in bfloat16: transformers computes experts in float32 with a function that cannot be compiled."""
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"num_attention_heads": 4, "lora": {"rank": 4}},
    "mistral": {"sliding_window": 6},
    "gemma2": {"attn_logit_softcapping": 0.02, "sliding_window": 6},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 16, **EXPERTS},
    "mixtral": {"num_local_experts": 3, **EXPERTS},
    "gpt_oss": {"num_attention_heads": 4, "num_local_experts": 4, "sliding_window": 6, **EXPERTS},
}


def row(lengths: list[int]) -> PackedBatch:
    generator = np.random.default_rng(len(lengths))
    ids = [generator.integers(3, 300, length).astype(np.int32) for length in lengths]
    return pack_samples(ids, [np.arange(length) > 0 for length in lengths])


def results(model: CausalLM, batch: PackedBatch) -> list[torch.Tensor]:
    """Logits without and with gradients, and the gradients of a loss of the latter."""
    model.zero_grad()
    with torch.no_grad():
        evaluated = model(batch, lambda hidden_NH, weight_VH: hidden_NH @ weight_VH.t())
    logits = model(batch, lambda hidden_NH, weight_VH: hidden_NH @ weight_VH.t())
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return [evaluated, logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def compiled() -> Iterator[CompileCounterWithBackend]:
    """Layers become whole graphs, or compiling them fails. Yield the counter of graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    whole = functools.partial(torch.compile, backend=counter, fullgraph=True)
    with mock.patch.object(torch, "compile", whole):
        yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        long("qwen2", False),
        ("qwen2", True),
        long("qwen3", True),
        long("mistral", False),
        long("gemma2", True),
        long("qwen3_moe", True),
        long("mixtral", False),
        long("gpt_oss", False),
    ],
)
def test_layers_are_whole_graphs_for_any_number_of_samples(
    tmp_path: Path, compiled: CompileCounterWithBackend, kind: str, recompute: bool
) -> None:
    settings = dict(KINDS[kind])
    options = {"lora": settings.pop("lora", {}), "enable_gradient_checkpointing": recompute}
    if "num_experts_per_tok" in settings:
        options["dtype"] = "bfloat16"
    folder = str(make_tiny_model(tmp_path, kind=kind, **settings))
    plain = load_model(ModelConfig.model_validate({"path": folder, **options}))
    model = load_model(ModelConfig.model_validate({"path": folder, "use_torch_compile": True, **options}))
    model.load_state_dict(plain.state_dict())
    graphs = []
    for lengths in ROWS:
        for ours, theirs in zip(results(model, row(lengths)), results(plain, row(lengths)), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        graphs.append(compiled.frame_count)
    assert graphs[0] > 0 and len(set(graphs)) == 1, graphs
    if model.routers is not None and plain.routers is not None:
        assert model.routers.take_metrics(ALONE) == pytest.approx(plain.routers.take_metrics(ALONE))
