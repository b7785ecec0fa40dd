"""Adapters as layers, and their merged weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hpc_rl.config.training.common import LoraConfig, ModelConfig, OptimConfig, TrainingConfig
from hpc_rl.errors import UserError
from hpc_rl.formats.peft_folder import block_layers, matching
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import causal_lm, count_flops
from hpc_rl.training.models.loading import load_sharded, trained_weights
from hpc_rl.training.models.lora import LoraLinear, adapted_layers, merged, rounded, without_adapters
from hpc_rl.training.models.scalar_model import critic
from hpc_rl.training.optim import build_optimizer
from hpc_rl.training.parallel.distributed import World
from tests.helpers import make_tiny_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def config(path: str, **lora: object) -> ModelConfig:
    return ModelConfig(path=path, lora=LoraConfig.model_validate({"rank": 4, **lora}))


def layer_with_values(bias: bool, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> LoraLinear:
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(6, 5, bias=bias, dtype=dtype), rank=2, scale=1.5, dropout=dropout)
    nn.init.normal_(layer.lora_A.weight)
    nn.init.normal_(layer.lora_B.weight)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 6), (1, 7, 6), (2, 3, 6)])
def test_a_layer_adds_its_adapter(bias: bool, shape: tuple[int, ...]) -> None:
    # In float64: the order of the sums, which depends on the processor, changes more of the gradients in float32.
    layer = layer_with_values(bias).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = x @ layer.weight.T + 1.5 * (x @ layer.lora_A.weight.T) @ layer.lora_B.weight.T
    expected = expected + layer.bias if bias else expected
    torch.testing.assert_close(layer(x), expected)
    parameters = [x, layer.lora_A.weight, layer.lora_B.weight]
    ours, theirs = (torch.autograd.grad(found.square().sum(), parameters) for found in (layer(x), expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    whole = merged(layer.weight, layer.lora_A.weight, layer.lora_B.weight, layer.scale)
    torch.testing.assert_close(nn.functional.linear(x, whole.double(), layer.bias), expected, atol=1e-4, rtol=1e-5)


def test_a_layer_in_bfloat16_keeps_its_adapter_in_float32() -> None:
    layer = layer_with_values(bias=True, dtype=torch.bfloat16)
    assert (layer.weight.dtype, layer.lora_A.weight.dtype, layer.lora_B.weight.dtype) == (
        *(torch.bfloat16, torch.float32, torch.float32),
    )
    found = layer(torch.randn(3, 6).bfloat16())
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    assert layer.lora_A.weight.grad is not None and layer.lora_A.weight.grad.dtype == torch.float32


def test_dropout_is_on_the_adapters_input_only() -> None:
    layer = layer_with_values(bias=False, dropout=0.999999)
    x = torch.randn(4, 6)
    torch.testing.assert_close(layer(x), x @ layer.weight.T)
    assert not torch.allclose(layer.eval()(x), x @ layer.weight.T)


def test_adapters_are_switched_off_and_on_again_after_an_error(path: str) -> None:
    model = load_sharded(causal_lm(config(path)), ALONE, TrainingConfig())
    layers = adapted_layers(model.hf).values()
    with pytest.raises(KeyError), without_adapters(model.hf):
        assert not any(layer.is_enabled for layer in layers)
        raise KeyError
    assert all(layer.is_enabled for layer in layers)


def test_only_adapters_and_the_head_of_a_critic_are_trained(path: str) -> None:
    state = torch.get_rng_state()
    policy = load_sharded(causal_lm(config(path, target_modules=["q_proj", "mlp.up_proj"])), ALONE, TrainingConfig())
    assert torch.equal(state, torch.get_rng_state())
    names = {f"model.layers.{n}.{layer}" for n in range(2) for layer in ("self_attn.q_proj", "mlp.up_proj")}
    adapters = {f"{name}.lora_{part}.weight" for name in names for part in "AB"}
    assert trained_weights(policy).keys() == adapters
    assert {name for name, one in policy.hf.named_parameters() if one.requires_grad} == adapters
    assert policy.adapters is not None and policy.adapters.targets == ("q_proj", "up_proj")
    assert len(build_optimizer(policy, OptimConfig()).state) == 8
    values = load_sharded(critic(path, config(path)), ALONE, TrainingConfig())
    assert trained_weights(values).keys() == {"score.weight"} | {
        f"{name}.lora_{part}.weight" for name in adapted_layers(values.hf) for part in "AB"
    }
    assert len(adapted_layers(values.hf)) == 14
    assert not adapted_layers(load_sharded(causal_lm(config(path), trained=False), ALONE, TrainingConfig()).hf)


def test_frozen_weights_cost_two_thirds(path: str) -> None:
    whole = count_flops(causal_lm(ModelConfig(path=path)).load())
    found = count_flops(causal_lm(config(path)).load())
    trained = sum(one.numel() for one in trained_weights(causal_lm(config(path)).load()).values())
    assert found.per_token == pytest.approx(whole.per_token * 4 / 6 + 6 * trained)
    assert found.per_target == whole.per_target * 4 / 6


def test_names_of_layers() -> None:
    layers = ["a.0.self_attn.q_proj", "a.0.mlp.up_proj", "a.1.self_attn.q_proj"]
    weights = ["a.0.mlp.experts.gate_up_proj", "a.1.mlp.experts.3.w1.weight"]  # of transformers, and of files
    assert matching([], layers, weights) == layers
    assert matching(["q_proj"], layers, weights) == [layers[0], layers[2]]
    assert matching(["a.1.self_attn.q_proj", "mlp.up_proj"], layers, weights) == layers[1:]
    for name, found in {
        "proj": "matches no linear layer of the model's transformer blocks",
        **dict.fromkeys(("experts", "gate_up_proj", "w1"), "names experts, which cannot have adapters: all .* only"),
    }.items():
        with pytest.raises(UserError, match=rf"{name} {found}; the linear layers are: q_proj, up_proj$"):
            matching(["q_proj", name], layers, weights)
    shapes = {"model.embed.weight": (9, 4), "layers.0.q.weight": (4, 4), "layers.0.norm.weight": (4,)}
    shapes["layers.0.experts.1.w1.weight"] = (4, 4)
    assert block_layers({**shapes, "layers.0.q.bias": (4,)}) == ["layers.0.q"]


def test_a_layer_that_is_named_like_others_is_exported_by_its_whole_name(path: str) -> None:
    target = "model.layers.1.self_attn.v_proj"
    model = causal_lm(config(path, target_modules=[target])).load()
    assert model.adapters is not None and model.adapters.targets == (target,)


def test_engines_receive_merged_weights_and_the_policy_keeps_its_own(path: str) -> None:
    model = load_sharded(causal_lm(config(path)), ALONE, TrainingConfig())
    for layer in adapted_layers(model.hf).values():
        nn.init.normal_(layer.lora_B.weight, std=0.1)
    before = {name: one.detach().clone() for name, one in model.hf.named_parameters()}
    source = WeightSource(model.hf, torch.float32)
    sent = dict(source)
    assert not source.is_in_place()
    assert [(entry.name, entry.shape) for entry in source.metadata()] == [(k, tuple(v.shape)) for k, v in sent.items()]
    plain = causal_lm(ModelConfig(path=path)).load()
    assert sent.keys() == dict(plain.hf.named_parameters()).keys()
    plain.hf.load_state_dict(sent)
    ids = np.arange(3, 20, dtype=np.int32)
    batch = pack_samples([ids], [ids > 3])
    torch.testing.assert_close(plain.hidden(batch), model.hidden(batch), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(plain.hidden(batch), causal_lm(ModelConfig(path=path)).load().hidden(batch), atol=1e-2)
    for name, one in model.hf.named_parameters():
        assert torch.equal(one, before[name])


def test_rounding_to_bfloat16_keeps_the_mean_of_small_changes() -> None:
    base = torch.full((400, 500), 0.02, dtype=torch.bfloat16).float()
    change = 1e-6  # a hundredth of the distance to the next value
    assert torch.equal((base + change).bfloat16().float(), base)
    for sign in (1, -1):
        found = rounded(sign * (base + change), torch.bfloat16, "weight").float()
        assert float((found - sign * base).mean()) == pytest.approx(sign * change, rel=0.1)
        assert len(found.unique()) == 2
    again, other = (rounded(base + change, torch.bfloat16, name) for name in ("weight", "other"))
    assert torch.equal(again, rounded(base + change, torch.bfloat16, "weight"))
    assert not torch.equal(again, other)
    assert torch.equal(rounded(base, torch.bfloat16, "weight").float(), base)
    assert torch.equal(rounded(base + change, torch.float32, "weight"), base + change)


def test_a_model_without_such_layers(path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="qproj matches no linear layer"):
        causal_lm(config(path, target_modules=["qproj"])).load()
    with pytest.raises(UserError, match="lm_head matches no linear layer"):
        causal_lm(config(path, target_modules=["lm_head"])).load()
