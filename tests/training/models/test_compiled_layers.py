"""Compiled layers are whole graphs for any number of samples in a row, with the numbers of plain layers.

Tracing and the division into a forward and a backward graph are torch.compile's own. The backend runs the graphs as
they are, because producing machine code takes minutes. All FAMILIES that `auto` compiles are here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.training.models.attention.packed_batch import PackedBatch, pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, load_model
from hpc_rl.training.models.compiled import FAMILIES, compile_layers, is_automatic, problem_of
from hpc_rl.training.parallel.distributed import World
from tests.finetune.jobs import spawn
from tests.helpers import make_tiny_model
from tests.marks import long
from tests.training.models import compile_ranks

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
ROWS = ([3, 6, 5, 3], [19], [4] * 9)
"""Lengths of samples. The first numbers of samples and tokens are not among the sizes of the models: they would be
traced as these sizes, and once again as numbers of their own."""
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_hidden_layers": 1}
"""Of models in bfloat16: transformers computes experts in float32 with a function that cannot be compiled."""
KINDS: dict[str, dict[str, Any]] = {
    **{family: {} for family in FAMILIES},
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
        *((long if family in ("llama", "qwen2") else pytest.param)(family, True) for family in FAMILIES),
        *(long(family, False) for family in FAMILIES),
        ("llama", "half"),
        long("qwen3_moe", True),
        long("mixtral", False),
        long("gpt_oss", False),
    ],
)
def test_layers_are_whole_graphs_for_any_number_of_samples(
    tmp_path: Path, compiled: CompileCounterWithBackend, kind: str, recompute: bool | str
) -> None:
    settings = dict(KINDS[kind])
    options = {"lora": settings.pop("lora", {}), "enable_gradient_checkpointing": recompute}
    if "num_experts_per_tok" in settings:
        options["dtype"] = "bfloat16"
    folder = str(make_tiny_model(tmp_path, kind=kind, **settings))
    config = ModelConfig.model_validate({"path": folder, "use_torch_compile": True, **options})
    plain, model = load_model(config), load_model(config)
    compile_layers(model, config, ALONE)
    model.load_state_dict(plain.state_dict())
    graphs = []
    for lengths in ROWS:
        for ours, theirs in zip(results(model, row(lengths)), results(plain, row(lengths)), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        graphs.append(compiled.frame_count)
    assert graphs[0] > 0 and len(set(graphs)) == 1, graphs
    if model.routers is not None and plain.routers is not None:
        assert model.routers.take_metrics(ALONE) == pytest.approx(plain.routers.take_metrics(ALONE))


@pytest.mark.parametrize(
    ("kind", "device", "options", "expected"),
    [
        *((family, "cuda", {}, True) for family in FAMILIES),
        ("llama", "cpu", {}, False),
        ("qwen3_moe", "cuda", {}, False),
        ("llama", "cuda", {"use_liger": True}, False),
        ("llama", "cuda", {"enable_gradient_checkpointing": True, "enable_activation_offload": True}, False),
        ("llama", "cuda", {"lora": {"rank": 4}}, True),
        ("llama", "cuda", {"lora": {"rank": 4, "quantize": "nf4"}}, False),
    ],
)
def test_auto_compiles_tested_families_on_gpus(
    tmp_path: Path, kind: str, device: str, options: dict[str, Any], expected: bool
) -> None:
    folder = str(make_tiny_model(tmp_path, kind=kind, **KINDS[kind] if kind == "qwen3_moe" else {}))
    model = load_model(ModelConfig(path=folder))
    config = ModelConfig.model_validate({"path": folder, **options})
    assert is_automatic(model, config, torch.device(device)) is expected


def test_a_trial_leaves_no_trace(tmp_path: Path, compiled: CompileCounterWithBackend) -> None:
    model, config = tiny(tmp_path)
    random, weights = torch.get_rng_state(), model.state_dict()
    assert problem_of(model, config, torch.device("cpu")) is None
    assert compiled.frame_count > 0
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert not any(layer._compiled_call_impl for layer in model.layers())


def test_a_missing_compiler_is_found_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, config = tiny(tmp_path)
    torch._dynamo.reset()
    with (
        inductor.patch({"cpp.cxx": (None, "/nonexistent/g++"), "force_disable_caches": True}),
        mock.patch("hpc_rl.training.models.compiled.is_automatic", return_value=True),
    ):
        compile_layers(model, config, ALONE)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("layers are not compiled, because this failed on rank 0: InvalidCxxCompiler: ")
    assert not any(layer._compiled_call_impl for layer in model.layers())
    results(model, row([5, 9]))


@pytest.mark.parametrize("fails", [long("forward"), "backward"])
def test_ranks_decide_together_if_one_cannot_compile(tmp_path: Path, fails: str) -> None:
    """Rank 1's compiler fails. Without an agreement, only rank 0 would train with compiled layers."""
    folder = str(make_tiny_model(tmp_path))
    ends = spawn([compile_ranks.__file__, folder, fails], 2, 300)
    assert [code for code, _, _ in ends] == [0, 0], ends
    lines = [[line for line in out.splitlines() if line.startswith("layers")] for _, out, _ in ends]
    assert lines[1] == [] and len(lines[0]) == 1
    assert lines[0] == ["layers are not compiled, because this failed on rank 1: OSError: no compiler on this node"]
    found = [json.loads(out[out.rindex("found ") + 6 :]) for _, out, _ in ends]
    assert found[0] == found[1] == {"compiled": 0, "loss": pytest.approx(found[0]["loss"], abs=0)}


@pytest.mark.long
def test_layers_that_ranks_share_are_compiled(tmp_path: Path) -> None:
    ends = spawn([compile_ranks.__file__, str(make_tiny_model(tmp_path)), "nothing"], 2, 300)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert ['{"compiled": 2,' in out for _, out, _ in ends] == [True, True]


def tiny(folder: Path) -> tuple[CausalLM, ModelConfig]:
    config = ModelConfig(path=str(make_tiny_model(folder, kind="llama")))
    return load_model(config), config
