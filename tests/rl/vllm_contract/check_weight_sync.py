"""Our senders, vLLM's transfers, vLLM's worker and our methods in it: weights arrive, also after a deep sleep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hpc_rl.errors import RunError
from hpc_rl.rl.rollout.vllm import VllmEngine
from hpc_rl.rl.weights.base import WeightSource
from hpc_rl.rl.weights.transfers import open_sender
from hpc_rl.training.distributed import World
from tests.rl.vllm_contract.pretend import CPU, DirectEngines, Model, make_engine, make_worker, pretended_cuda

SMALL_BUFFER = 100
"""Bytes: several buckets, and a tensor that is larger than one."""


@dataclass
class Setting:
    policy: nn.Module
    model: Model
    worker: Any
    engine: VllmEngine
    backend: str

    def sender(self, rank: int = 0, size: int = 1) -> Any:
        source = WeightSource(self.policy, torch.float32)
        world = World(rank, size, CPU)
        return open_sender(self.backend, source, DirectEngines(self.engine), world, SMALL_BUFFER)

    def assert_equal(self) -> None:
        expected = dict(self.policy.named_parameters())
        for name, parameter in self.model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
        assert self.model.table.tolist() == [0, 1, 2, 3]


@pytest.fixture(params=["ipc", "nccl"])
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    with pretended_cuda(), torch.no_grad():
        model = Model()
        worker = make_worker(request.param, model)
        yield Setting(Model(), model, worker, make_engine(worker, request.param), request.param)


def test_every_sync_brings_the_current_weights(setting: Setting) -> None:
    sender = setting.sender()
    for _ in range(3):
        for parameter in setting.policy.parameters():
            parameter.add_(torch.randn(parameter.shape))
        sender.send_weights()
        setting.assert_equal()
    setting.engine._llm.llm_engine.reset_prefix_cache.assert_called()


def test_weights_that_a_deep_sleep_discarded_are_replaced(setting: Setting) -> None:
    """Level 2 discards every tensor of the model; the buffers come back with the weights' memory."""
    memory = Memory(setting.model)
    setting.worker._sleep_mode_backend = memory
    sender = setting.sender()
    setting.engine.sleep()
    assert memory.discarded == ["weights"]
    sender.send_weights()
    setting.assert_equal()
    assert memory.resumed == [["weights"]]
    setting.engine.wake()
    assert memory.resumed == [["weights"], ["kv_cache"]]


def test_a_parameter_that_no_update_brought_is_an_error(setting: Setting) -> None:
    setting.policy.second = nn.Identity()
    with pytest.raises(RunError, match=r"no weights for 2 of its parameters \(second.bias, second.weight\)"):
        setting.sender().send_weights()


@pytest.mark.parametrize("setting", ["ipc"], indirect=True)
def test_buckets_in_host_memory_bring_the_weights_too(setting: Setting) -> None:
    """The way for CPUs: vLLM reloads the model layer by layer, from buckets that our methods in its worker read."""
    engine = make_engine(setting.worker, "host")
    engine._bucket_bytes = SMALL_BUFFER
    for _ in range(2):
        for parameter in setting.policy.parameters():
            parameter.add_(torch.randn(parameter.shape))
        engine.load_weights(setting.policy.named_parameters())
        setting.assert_equal()
    with pytest.raises(RunError, match=r"no weights for 2 of its parameters \(first.bias, first.weight\)"):
        engine.load_weights((f"second.{name}", weight) for name, weight in setting.policy.second.named_parameters())


def test_other_ranks_only_gather(setting: Setting) -> None:
    before = [parameter.clone() for parameter in setting.model.parameters()]
    setting.sender(rank=1, size=2).send_weights()
    assert all(map(torch.equal, before, setting.model.parameters()))
    setting.engine._llm.collective_rpc.assert_not_called()


class Memory:
    """Stands for the allocator below vLLM's sleep mode: what is suspended without a copy loses its content."""

    def __init__(self, model: nn.Module) -> None:
        from vllm.device_allocator import sleep_mode_backend

        self._model = model
        self.discarded: list[str] = []
        self.resumed: list[Any] = []
        self._suspend = sleep_mode_backend.CuMemBackend.suspend
        self._module = sleep_mode_backend

    def suspend(self, level: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: self)
            self._suspend(self, level)  # type: ignore[arg-type]

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        """See CuMemAllocator."""
        if "weights" not in offload_tags:
            self.discarded.append("weights")
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                tensor.fill_(torch.nan)

    def resume(self, tags: Any) -> None:
        self.resumed.append(tags)
