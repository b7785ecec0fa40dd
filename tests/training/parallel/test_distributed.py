"""The choice of a device, with accelerators that torch pretends to have, and the time limits of ranks."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch

from hpc_rl.errors import UserError
from hpc_rl.training.parallel import distributed
from tests.finetune.jobs import spawn
from tests.training import time_limits


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


def test_a_rank_waits_for_the_others_as_long_wherever_it_waits() -> None:
    """In the groups of meshes too, and in the store, in which NCCL finds the key of a new communicator."""
    for code, output, errors in spawn([time_limits.__file__, "groups"], 4, ranks_per_node=4):
        assert code == 0, errors
        found = json.loads(output)
        longer = found.pop("all, longer")
        assert set(longer) == {7 * 24 * 3600.0}
        assert {limit for limits in found.values() for limit in limits} == {1234.0}, found
        assert len(found) == 2 + 2 * (2 + 2 + 1) + 1


def test_the_limit_of_the_store_is_that_of_the_collectives() -> None:
    (first, *_), (second, output, errors) = spawn([time_limits.__file__, "rank0"], 2)
    assert (first, second) == (0, 0), errors
    found = json.loads(output)
    assert found["seconds"] < 250 and "1000" in found["error"], found
