"""Weights in 4 bits below adapters. bitsandbytes has the same functions for CPUs, which these tests run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from hpc_rl.config.training.common import LoraConfig, ModelConfig, TrainingConfig
from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.run_dir import RunDir
from hpc_rl.training.checkpoints.adapter_weights import open_weights
from hpc_rl.training.checkpoints.export import export
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm, count_flops
from hpc_rl.training.models.four_bit import (
    FourBitLinear,
    FourBitWeight,
    four_bit_weights,
    rounded_to_four_bits,
)
from hpc_rl.training.models.loading import load_sharded, trained_weights
from hpc_rl.training.models.lora import LoraLinear, adapted_layers
from hpc_rl.training.models.scalar_model import critic
from hpc_rl.training.parallel.distributed import World
from tests.finetune.jobs import ask_at, run_here, series, spawn
from tests.helpers import make_tiny_model, write_chats
from tests.training.models import four_bit_ranks

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"model.lora.quantize=nf4 needs bitsandbytes, .* pip install '.\[qlora\]'"):
        FourBitWeight(torch.zeros(2, 64))


def test_an_export_without_the_library_may_leave_the_adapters_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "adapter_config.json").touch()
    hf: Any = None
    with pytest.raises(UserError, match=r"\[qlora\]' .*, or export the adapters alone \(hpc-rl export --no-merge\)$"):
        open_weights(tmp_path, hf, four_bit=True)


@pytest.fixture(autouse=True)
def library(request: pytest.FixtureRequest) -> None:
    if "without_the_library" not in request.node.name:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make test-qlora")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def config(path: str, **lora: object) -> ModelConfig:
    return ModelConfig(path=path, lora=LoraConfig.model_validate({"rank": 4, "quantize": "nf4", **lora}))


def load(path: str, **lora: object) -> CausalLM:
    """A model with adapters that are not 0."""
    model = load_sharded(causal_lm(config(path, **lora)), ALONE, TrainingConfig())
    torch.manual_seed(1)
    for layer in adapted_layers(model.hf).values():
        nn.init.normal_(layer.lora_B.weight, std=0.1)
    return model


def test_a_weight_has_the_values_of_nf4() -> None:
    """The 16 values are those of the paper (appendix E), times a scale for each 64 weights."""
    values = (-1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0, 0.0795803, 0.1609302)
    values += (0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1)
    weight = torch.tensor([*values] * 8).view(2, 64)
    found = FourBitWeight(weight)
    torch.testing.assert_close(found.dequantized(), weight, atol=1e-5, rtol=1e-5)
    assert found._packed is not None and found._packed.numel() * found._packed.itemsize == 64
    torch.manual_seed(0)
    many = torch.randn(256, 256)
    error = (rounded_to_four_bits(many) - many).abs().mean() / many.abs().mean()
    assert 0.08 < error < 0.1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_and_its_gradients(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, bias=bias, dtype=dtype)
    weight = rounded_to_four_bits(plain.weight)
    assert weight.dtype == dtype
    layer = LoraLinear(FourBitLinear(plain), rank=2, scale=1.5, dropout=0.0)
    assert layer.weight is None and layer.bias is plain.bias
    for matrix in (layer.lora_A, layer.lora_B):
        nn.init.normal_(matrix.weight, std=0.1)
    x = torch.randn(1, 7, 64, dtype=dtype, requires_grad=True)
    down, up = (matrix.weight.to(dtype) for matrix in (layer.lora_A, layer.lora_B))
    expected = nn.functional.linear(x, weight, plain.bias) + 1.5 * (x @ down.T) @ up.T
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    torch.testing.assert_close(layer(x), expected, **tolerance)
    parameters = [x, layer.lora_A.weight, layer.lora_B.weight]
    ours, theirs = (torch.autograd.grad(found.float().square().mean(), parameters) for found in (layer(x), expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_the_model_computes_with_the_rounded_weights_of_its_blocks(path: str) -> None:
    model = load(path, target_modules=["q_proj", "up_proj"])
    plain = causal_lm(ModelConfig(path=path)).load()
    names = {f"{name}.weight" for name, layer in plain.hf.named_modules() if isinstance(layer, nn.Linear)}
    names -= {"lm_head.weight"}
    four_bit = four_bit_weights(model.hf)
    assert four_bit.keys() == names and len(adapted_layers(model.hf)) == 4
    assert not names & dict(model.hf.named_parameters()).keys() and not names & model.hf.state_dict().keys()
    assert all(".lora_" in name for name in trained_weights(model))
    assert model.adapters is not None and model.adapters.targets == ("q_proj", "up_proj")
    expected = count_flops(causal_lm(config(path, target_modules=["q_proj", "up_proj"], quantize=None)).load())
    assert count_flops(model) == expected
    before = dict(plain.hf.named_parameters())
    sent = dict(source := WeightSource(model.hf, torch.float32))
    assert sent.keys() == before.keys() and not source.is_in_place()
    assert [(entry.name, entry.shape) for entry in source.metadata()] == [(k, tuple(v.shape)) for k, v in sent.items()]
    for name, weight in sent.items():
        rounded = rounded_to_four_bits(before[name].detach()) if name in names else before[name]
        has_adapter = name.endswith(("q_proj.weight", "up_proj.weight"))
        assert torch.equal(weight, rounded) == (not has_adapter), name
    plain.hf.load_state_dict(sent)
    ids = np.arange(3, 20, dtype=np.int32)
    batch = pack_samples([ids], [ids > 3])
    torch.testing.assert_close(plain.hidden(batch), model.hidden(batch), atol=1e-4, rtol=1e-3)


def test_a_critic_has_4_bits_too(path: str, tmp_path: Path) -> None:
    values = load_sharded(critic(path, config(path)), ALONE, TrainingConfig())
    assert len(four_bit_weights(values.hf)) == 14
    assert isinstance(values.head, nn.Linear) and values.head.weight.requires_grad


def pickled(path: str, folder: Path) -> str:
    """Return a copy of a model that transformers has to load, so that rank 0 sends it."""
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return str(folder)


@pytest.mark.slow
def test_two_ranks_compute_as_one(path: str, tmp_path: Path) -> None:
    """Each rank has the whole 4-bit weights; the rest is sharded. In the second case rank 0 sends the weights."""
    cases = [path, pickled(path, tmp_path / "pickled")]
    for code, out, errors in spawn(["-m", four_bit_ranks.__name__, json.dumps(cases)], ranks=2, timeout=300):
        assert code == 0, errors
        assert json.loads(out.rpartition("found ")[2]) == [[], []]


def test_a_run_resumes_and_exports_what_it_trained(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_rl.config.training.finetune.gpu_problems", lambda *_: ())  # it refuses CPUs
    base = [
        *("--kind", "sft", f"model.path={path}", f"data.train_files={write_chats(tmp_path / 'train.jsonl', 31)}"),
        *("data.train_batch_size=8", "optim.lr=1e-2", "data.max_length=256", "trainer.micro_tokens=1024"),
        *("model.lora={rank: 3, alpha: 12, quantize: nf4}", "trainer.export_dtype=float32"),
    ]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert run_here(base, whole, "trainer.total_training_steps=4") == 0
    losses = series(whole, "train/loss")
    assert losses[-1] < losses[0]
    run.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        ask_at(patch, RunDir(run), micro_batch=2)
        assert run_here(base, run, "trainer.total_training_steps=4") == EXIT_STOPPED
    (run / "stop").unlink()
    assert run_here(base, run, "trainer.total_training_steps=4") == 0
    assert series(run, "train/loss") == pytest.approx(losses, abs=1e-6)
    with pytest.raises(UserError, match=r"was trained with model\.lora\.quantize=nf4, and the run has null: "):
        run_here(base, run, "trainer.total_training_steps=4", "model.lora.quantize=null")
    export(whole, tmp_path / "adapters", merge=False)
    lora = LoraConfig(path=str(tmp_path / "adapters"), quantize="nf4")
    model = load_sharded(causal_lm(ModelConfig(path=path, lora=lora)), ALONE, TrainingConfig())
    exported = AutoModelForCausalLM.from_pretrained(whole / "model").state_dict()
    base_weights = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for name, weight in WeightSource(model.hf, torch.float32):
        torch.testing.assert_close(exported[name], weight, atol=1e-6, rtol=1e-5)
        assert torch.equal(weight, base_weights[name]) == ("_proj" not in name or name.endswith("bias")), name
