"""Layers that are computed again, and their inputs in host memory: the same gradients, bit for bit."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from hpc_rl.config.training.common import ModelConfig
from hpc_rl.errors import UserError
from hpc_rl.training.models import recomputation
from hpc_rl.training.models.attention.packed_batch import pack_samples
from hpc_rl.training.models.causal_lm import CausalLM, load_model
from hpc_rl.training.models.recomputation import HostInputs, recompute
from tests.helpers import make_tiny_model

LAYERS = 5
HALF: dict[str, Any] = {"enable_gradient_checkpointing": "half"}
HOST: dict[str, Any] = {"enable_gradient_checkpointing": True, "enable_activation_offload": True}
BATCH = pack_samples(
    [np.arange(3, 20, dtype=np.int32), np.arange(40, 49, dtype=np.int32)], [np.arange(17) > 0, np.arange(9) > 2]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS))


def loss_of(model: CausalLM) -> torch.Tensor:
    return model(BATCH, lambda hidden_NH, weight_VH: (hidden_NH @ weight_VH.t()).square().mean())


def gradients(model: CausalLM) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def expected(folder: str) -> list[torch.Tensor]:
    model = load_model(ModelConfig(path=folder))
    loss_of(model).backward()
    return gradients(model)


@pytest.mark.parametrize(
    ("settings", "again"),
    [({"enable_gradient_checkpointing": True}, [0, 1, 2, 3, 4]), (HALF, [0, 2, 4]), (HOST, [0, 1, 2, 3, 4])],
    ids=["all", "half", "host"],
)
def test_gradients_are_equal_and_the_layers_are_computed_twice(
    folder: str, expected: list[torch.Tensor], settings: dict[str, Any], again: list[int]
) -> None:
    model = load_model(ModelConfig(path=folder, **settings))
    calls = [0] * LAYERS
    for number, layer in enumerate(model.layers()):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    loss_of(model).backward()
    assert [number for number in range(LAYERS) if calls[number] == 2] == again
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(model), expected, strict=True))


class Watched(recomputation._Input):
    alive: ClassVar[weakref.WeakSet[recomputation._Input]] = weakref.WeakSet()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Watched.alive.add(self)


def test_one_input_comes_while_a_layer_computes_and_the_host_forgets_them(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the input that a layer is computed from, the device holds the one that leaves, or the one that comes."""
    monkeypatch.setattr(recomputation, "_Input", Watched)
    model = load_model(ModelConfig(path=folder, **HOST))
    seen: list[int] = []
    for layer in model.layers():
        layer.mlp.register_forward_pre_hook(
            lambda *_: seen.append(sum(one.on_device is not None for one in Watched.alive))
        )
    loss = loss_of(model)
    assert len(Watched.alive) == LAYERS
    loss.backward()
    assert seen == [1] * LAYERS + [1] * (LAYERS - 1) + [0]
    del loss
    assert not Watched.alive


def test_two_rows_may_be_in_flight_and_a_graph_be_used_twice(folder: str, expected: list[torch.Tensor]) -> None:
    model = load_model(ModelConfig(path=folder, **HOST))
    first, second = loss_of(model), loss_of(model)
    first.backward(retain_graph=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(model), expected, strict=True))
    model.zero_grad()
    first.backward()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(model), expected, strict=True))
    model.zero_grad()
    second.backward()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(model), expected, strict=True))


def test_an_input_that_was_overwritten_on_the_device_comes_from_the_host() -> None:
    inputs = HostInputs()
    kept: list[Any] = []
    checkpoint = inputs.kept_by(lambda tensor: kept.append(inputs._leave(tensor)))
    tensors = [torch.full((3,), float(number)) for number in range(3)]
    for tensor in tensors:
        checkpoint(tensor)
        tensor.fill_(-1)
    # The newest one is still on the device; the others were copied when they left.
    assert [inputs._come_back(one).tolist() for one in kept] == [[0] * 3, [1] * 3, [-1] * 3]
    empty = torch.empty(0)
    assert inputs._leave(empty) is empty
    assert inputs._come_back(empty) is empty


def test_layers_without_a_switch_are_refused(folder: str) -> None:
    hf = load_model(ModelConfig(path=folder)).hf
    with pytest.raises(UserError, match=r"qwen2 have layers without a switch for recomputation: use model\.enable"):
        recompute(hf, [nn.Linear(1, 1)], ModelConfig(path=folder, **HALF))
    recompute(hf, [nn.Linear(1, 1)], ModelConfig(path=folder, enable_gradient_checkpointing=True))
    recompute(hf, [nn.Linear(1, 1)], ModelConfig(path=folder))


@pytest.mark.parametrize("value", [False, "half"])
def test_only_inputs_of_recomputed_layers_move(folder: str, value: Any) -> None:
    found = rf"enable_gradient_checkpointing is {str(value).lower()}: set it to true"
    with pytest.raises(ValidationError, match=found):
        ModelConfig(path=folder, enable_gradient_checkpointing=value, enable_activation_offload=True)
