"""The choice of a device, with accelerators that torch pretends to have."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from hpc_rl.errors import UserError
from hpc_rl.training import distributed


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 2) -> list[int]:
    """Let torch have `count` devices of a kind. Return the list of the devices that are chosen."""
    chosen: list[int] = []
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    return chosen


@pytest.mark.parametrize(("kind", "found"), [("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu"), (None, "cpu")])
def test_a_trainer_without_a_job_takes_the_device_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, found: str
) -> None:
    pretend(monkeypatch, kind)
    assert distributed.fill_in_device({"trainer": {}}) == {"trainer.device": found}
    assert distributed.fill_in_device({"trainer": {"device": "cpu"}}) == {}


def test_a_rank_takes_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = pretend(monkeypatch, "xpu")
    assert distributed.choose_device("xpu", 1) == torch.device("xpu", 1)
    assert chosen == [1]
    assert distributed.choose_device("cpu", 7) == torch.device("cpu")


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "xpu")
    with pytest.raises(UserError, match=r"is xpu and this process needs GPU 2, but it sees 2 GPUs"):
        distributed.choose_device("xpu", 2)
    with pytest.raises(UserError, match=r"is cuda and this process needs GPU 0, but it sees 0 GPUs"):
        distributed.choose_device("cuda", 0)


def test_a_device_that_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(UserError, match=r"trainer\.device=npu needs the package torch_npu"):
        distributed.choose_device("npu", 0)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    with pytest.raises(UserError, match=r"trainer\.device is npu and this process needs GPU 0, but it sees 0 GPUs"):
        distributed.choose_device("npu", 0)
