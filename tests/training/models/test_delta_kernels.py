"""Kernels of flash-linear-attention in packed rows. Triton's interpreter runs the kernels on a CPU."""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_rl.training.models.mixers import PerSample
from tests.small_models.families import make_model
from tests.training.models.test_mixers import assert_equal, load, step


class Counted(int):
    """A number of a loop, which the interpreter leaves without the methods of Triton's tensors."""

    def to(self, _type: Any) -> int:
        return self


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Install kernels where transformers looks for them, before it reads the code of a model. Return the boundaries
    that the delta rule receives. causal-conv1d is in CUDA, so its stand-in calls the convolution per sample."""
    pytest.importorskip("fla", reason="flash-linear-attention is not installed: make test-triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for GPUs: make test-triton")
    from fla.ops import gated_delta_rule
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "_bench", lambda *_args, **_options: [0.0] * 3)
    states = importlib.import_module("fla.ops.common.chunk_delta_h")
    monkeypatch.setattr(states, "range", lambda *ends: map(Counted, builtins.range(*ends)), raising=False)

    def conv(
        x_1CT: torch.Tensor, weight: torch.Tensor, bias: Any = None, seq_idx: Any = None, activation: Any = None
    ) -> torch.Tensor:
        lengths = [x_1CT.shape[2]] if seq_idx is None else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        weight_C1K, pad = weight[:, None], weight.shape[1] - 1
        parts = [
            torch.conv1d(part, weight_C1K, bias, padding=pad, groups=len(weight))[..., : part.shape[2]]
            for part in x_1CT.split(lengths, 2)
        ]
        found = torch.cat(parts, 2)
        return torch.nn.functional.silu(found) if activation == "silu" else found

    package = ModuleType("causal_conv1d")
    package.__dict__.update(causal_conv1d_fn=conv, causal_conv1d_update=conv, __spec__=SimpleNamespace(name="conv"))
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    own, found = gated_delta_rule.chunk_gated_delta_rule, list[Any]()

    def noted(
        q: Any, k: Any, v: Any, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None
    ) -> Any:
        found.append(cu_seqlens)
        return own(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)

    monkeypatch.setattr(gated_delta_rule, "chunk_gated_delta_rule", noted)
    return found


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "olmo_hybrid"])
def test_whole_rows_are_the_samples(tmp_path: Path, kind: str, calls: list[Any]) -> None:
    """Logits and gradients are those that the code of transformers without kernels has, one sample at a time."""
    path = str(make_model(tmp_path, kind))
    model = load(path)
    assert {mixer.whole_rows for mixer in model.hf.modules() if isinstance(mixer, PerSample)} == {True}
    calls.clear()
    found = step(model)
    assert [bounds.tolist() for bounds in calls] == [[0, 7, 47, 60, 63, 84]] * 2
    for mixer in model.hf.modules():
        if isinstance(mixer, PerSample):
            mixer.whole_rows = False
    model.zero_grad()
    assert_equal(found, step(model), 1e-3)
