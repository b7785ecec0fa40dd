"""Tensors that leave the device and come back, and the models and optimizers whose parts do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpc_rl.training.parallel import offload as module
from hpc_rl.training.parallel.offload import ModelOffload, OffloadedTensors, moments_of, parts_of


def bytes_of(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_tensors_come_back_as_they_were() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(5, dtype=torch.bfloat16), torch.zeros(0)]
    before = [tensor.clone() for tensor in tensors]
    offloaded = OffloadedTensors(tensors)
    assert (offloaded.nbytes, offloaded.is_away) == (6 * 4 + 5 * 2, False)
    offloaded.leave()
    assert (bytes_of(*tensors), offloaded.is_away) == ([0, 0, 0], True)
    offloaded.leave()
    offloaded.come_back()
    assert (bytes_of(*tensors), offloaded.is_away) == ([24, 10, 0], False)
    for tensor, expected in zip(tensors, before, strict=True):
        assert torch.equal(tensor, expected)
    offloaded.come_back()


def test_changes_are_kept() -> None:
    tensor = torch.ones(3)
    offloaded = OffloadedTensors([tensor])
    offloaded.leave()
    with offloaded.back():
        tensor.add_(1)
    assert offloaded.is_away
    with offloaded.back(changed=False):
        assert tensor.tolist() == [2, 2, 2]
    with offloaded.back(), offloaded.back():
        tensor.add_(1)
    offloaded.come_back()
    assert tensor.tolist() == [3, 3, 3]


def test_unchanged_tensors_are_not_copied_again() -> None:
    tensor = torch.ones(3)
    offloaded = OffloadedTensors([tensor])
    offloaded.leave()
    with offloaded.back(changed=False):
        tensor.add_(1)  # a change that was denied is lost
    offloaded.come_back()
    assert tensor.tolist() == [1, 1, 1]


def test_the_first_copy_is_always_made() -> None:
    tensor = torch.ones(3)
    offloaded = OffloadedTensors([tensor])
    offloaded.leave(changed=False)
    offloaded.come_back()
    assert tensor.tolist() == [1, 1, 1]


def test_an_error_in_a_block_leaves_nothing_on_the_device() -> None:
    tensor = torch.ones(3)
    offloaded = OffloadedTensors([tensor])
    offloaded.leave()
    with pytest.raises(ValueError, match="no"), offloaded.back():
        raise ValueError("no")
    assert bytes_of(tensor) == [0]


def test_tensors_on_the_device_stay_there() -> None:
    tensor = torch.ones(3)
    offloaded = OffloadedTensors([tensor])
    with offloaded.back():
        pass
    assert not offloaded.is_away


def test_copies_share_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OFFLOAD_BYTES", 256)
    sizes = (16, 17, 1, 0, 100, 3)
    tensors = [torch.arange(float(size)) for size in sizes]
    offloaded = OffloadedTensors(tensors)
    offloaded.leave()
    assert list(dict.fromkeys(bytes_of(*offloaded._copies))) == [64 + 128 + 64, 448, 64]
    assert all(copy.storage_offset() * 4 % 64 == 0 for copy in offloaded._copies)
    offloaded.come_back()
    for tensor, size in zip(tensors, sizes, strict=True):
        assert torch.equal(tensor, torch.arange(float(size)))


def test_nothing_to_move() -> None:
    offloaded = OffloadedTensors([])
    offloaded.leave()
    offloaded.come_back()
    assert offloaded.nbytes == 0


def stepped(level: Any) -> tuple[nn.Linear, torch.optim.AdamW, ModelOffload]:
    """Return a model after three steps of its optimizer, whose moments are with the model or away."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.compute_weights = None  # type: ignore[assignment]  # as in a PackedModel
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
    for parameter in model.parameters():
        state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        optimizer.state[parameter] = {"step": torch.zeros(()), **state}
    offload = ModelOffload(level, model, optimizer)  # type: ignore[arg-type]  # any module will do
    for _ in range(3):
        model(torch.ones(4, 3)).square().sum().backward()
        offload.step()
        optimizer.zero_grad()
    return model, optimizer, offload


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return moments_of(optimizer, model.parameters())


@pytest.mark.parametrize("level", ["optimizer", "all"])
@pytest.mark.parametrize("most_bytes", [1, 1 << 30])
def test_steps_are_the_same_with_moments_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, level: str, most_bytes: int
) -> None:
    plain, _, _ = stepped("none")
    monkeypatch.setattr(module, "parts_of", lambda optimizer: parts_of(optimizer, most_bytes))
    model, optimizer, offload = stepped(level)
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(model.bias, plain.bias)
    assert bytes_of(*moments(model, optimizer)) == [0] * 4
    with offload.whole():
        assert bytes_of(*moments(model, optimizer)) == [24, 24, 8, 8]
    assert bytes_of(*moments(model, optimizer)) == [0] * 4
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_nothing_moves_without_the_option() -> None:
    model, optimizer, _ = stepped("none")
    assert bytes_of(model.weight, *moments(model, optimizer)) == [24, 24, 24, 8, 8]


def test_the_optimizer_gets_one_part_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part's moments take 16 bytes; one that is larger than the limit is alone."""
    parameters = [nn.Parameter(torch.ones(size)) for size in (2, 2, 2, 9, 1, 1)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        optimizer.state[parameter] = {"step": torch.zeros(()), **state}
        parameter.grad = torch.ones_like(parameter)
    sizes = [sorted(parameter.numel() for parameter in part) for part in parts_of(optimizer, 32)]
    assert sizes == [[2, 2], [2], [9], [1, 1]]
    monkeypatch.setattr(module, "parts_of", lambda optimizer: parts_of(optimizer, 32))
    offload = ModelOffload("optimizer", nn.Module(), optimizer)  # type: ignore[arg-type]
    seen: list[int] = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW) -> None:
        seen.append(sum(bytes_of(*moments_of(optimizer, parameters))))
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    offload.step()
    assert seen == [32, 16, 72, 16]
    assert all(torch.all(parameter < 1) for parameter in parameters)


def test_an_error_in_a_step_leaves_the_groups_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer, offload = stepped("optimizer")

    def fail(_: torch.optim.AdamW) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    with pytest.raises(RuntimeError, match="no"):
        offload.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
