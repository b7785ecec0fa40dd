"""Layers with Liger's kernels, against transformers' code. Triton's interpreter runs the kernels on a CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.model_kind import _LIGER
from hpc_rl.training.models.attention.packed_batch import PackedBatch, pack_samples
from hpc_rl.training.models.causal_lm import causal_lm, load_model
from hpc_rl.training.models.scalar_model import critic
from tests.helpers import make_tiny_model


def test_without_the_library_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UserError, match=r"model.use_liger=true needs liger-kernel, .*: pip install .*\[liger\]"):
        load_model(ModelConfig(path=str(make_tiny_model(tmp_path)), use_liger=True))


def test_other_models_are_refused_without_the_library(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, kind="gemma2")
    with pytest.raises(UserError, match=r"is of type gemma2, which model.use_liger=true does not support \(exaone4, "):
        load_model(ModelConfig(path=str(folder), use_liger=True))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Complete what the interpreter lacks: numbers with a fraction as arguments, and functions of CUDA's libdevice.
    Yield the names of the kernels that have run."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make test-triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles for GPUs: make test-triton")
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    plain, run, names = interpreter._implicit_cvt, interpreter.GridExecutor.__call__, set()

    def convert(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return plain(argument)

    def note(executor: Any, *args: Any, **options: Any) -> Any:
        names.add(executor.fn.__name__)
        return run(executor, *args, **options)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", note)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.math.rsqrt(x))
    yield names


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what Liger replaces in the source of models."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    for kind in _LIGER:
        try:
            source = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(kind))].__module__]
        except (KeyError, ValueError):
            continue
        for name, value in list(vars(source).items()):
            if not name.startswith("__"):
                monkeypatch.setattr(source, name, value)


def batch() -> PackedBatch:
    generator = np.random.default_rng(0)
    ids = [generator.integers(3, 300, length).astype(np.int32) for length in (5, 1, 12)]
    return pack_samples(ids, [np.arange(len(sample)) > 0 for sample in ids])


def results(model: Any) -> list[torch.Tensor]:
    """The model's outputs, and the gradients of what it trains."""
    found = model(batch()) if not hasattr(model, "softcap") else model(batch(), lambda h, w: h @ w.t())
    found.square().sum().backward()
    return [found.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def compare(pretrained: Any, folder: str, **settings: Any) -> None:
    plain = pretrained(ModelConfig(path=folder, **settings)).load()
    expected = results(plain)  # before Liger replaces the function of the rotary embedding
    model = pretrained(ModelConfig(path=folder, use_liger=True, **settings)).load()
    model.load_state_dict(plain.state_dict())
    found = results(model)
    assert len(expected) > 10
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("kind", _LIGER)
def test_layers_equal_those_of_transformers(tmp_path: Path, kernels: set[str], sources: None, kind: str) -> None:
    pytest.importorskip(f"transformers.models.{kind}", reason=f"this transformers has no {kind}")
    compare(causal_lm, str(make_tiny_model(tmp_path, kind=kind, pad_token_id=0)))
    assert {"_rms_norm_forward_kernel", "_rms_norm_backward_kernel", "_triton_rope"} <= kernels
    assert any("swiglu" in name and "backward" in name for name in kernels)


def test_models_without_liger_keep_their_layers(tmp_path: Path, kernels: set[str], sources: None) -> None:
    """A teacher in the same process, for example, whose MLPs have biases."""
    load_model(ModelConfig(path=str(make_tiny_model(tmp_path / "student")), use_liger=True))
    folder = str(make_tiny_model(tmp_path / "teacher", kind="llama"))
    load_model(ModelConfig(path=folder, use_liger=True))
    names = {type(module).__name__ for module in load_model(ModelConfig(path=folder)).modules()}
    assert {"LlamaMLP", "LlamaRMSNorm"} <= names and not any("Liger" in name for name in names)


def test_with_adapters_and_recomputation(tmp_path: Path, kernels: set[str], sources: None) -> None:
    lora = {"rank": 4, "target_modules": ["q_proj", "gate_proj", "down_proj"]}
    compare(causal_lm, str(make_tiny_model(tmp_path)), lora=lora, enable_gradient_checkpointing=True)
    assert "_triton_rope" in kernels


def test_critics(tmp_path: Path, kernels: set[str], sources: None) -> None:
    folder = str(make_tiny_model(tmp_path))
    compare(lambda config: critic(folder, config), folder)
    assert "_triton_rope" in kernels
