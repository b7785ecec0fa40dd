"""vLLM's own classes without a GPU: the calls that would reach CUDA or NCCL are replaced, everything else is vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.vllm.engine import VllmEngine
from hpc_rl.rl.rollout.vllm.processes import WorkerWatch
from hpc_rl.rl.rollout.vllm.worker import WeightUpdates

CPU = torch.device("cpu")


class Model(nn.Module):
    """Stands for a model of vLLM: it loads weights by name through their weight loaders, and returns the names.

    Args:
        part, parts: the process has this part of the rows of each weight, of so many.
    """

    def __init__(self, part: int = 0, parts: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8 // parts)
        self.second = nn.Linear(8, 4 // parts)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

        def load_part(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:  # vLLM reads these names
            param.data.copy_(loaded_weight.chunk(parts)[part])

        for parameter in self.parameters() if parts > 1 else ():
            parameter.weight_loader = load_part  # type: ignore[attr-defined]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
            loaded.add(name)
        return loaded


def make_worker(backend: str, model: nn.Module, rank: int = 0, size: int = 1) -> Any:
    """Return vLLM's GPU worker with our methods mixed in, around a model, without a device.

    Args:
        rank, size: among the processes of its engine.
    """
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
    from vllm.v1.worker.gpu_worker import Worker

    taken = [name for name in vars(WeightUpdates) if not name.startswith("__") and hasattr(Worker, name)]
    assert not taken, f"vLLM's worker has methods of these names itself: {taken}"

    class ExtendedWorker(Worker, WeightUpdates):
        def __new__(cls) -> Any:
            return object.__new__(cls)  # this process is not a worker's: check_calls.py has what one prepares

        def __init__(self) -> None:
            self.vllm_config = mock.MagicMock()
            self.model_config = self.vllm_config.model_config
            self.vllm_config.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=size, rank=rank)
            self.parallel_config = self.vllm_config.parallel_config
            self.rank = rank
            self.device = CPU
            self.model_runner = mock.MagicMock(model=model, get_model=lambda: model, device=CPU)
            self._weight_update_active = self._weight_update_is_draft = False
            self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend=backend), self.vllm_config, CPU, model
            )

    record_metadata_for_reloading(model)
    return ExtendedWorker()


def make_engine(worker: Any, backend: str) -> VllmEngine:
    """Return a VllmEngine whose LLM accepts only calls that vLLM's class accepts, and passes RPCs to the worker."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine

    def collective_rpc(method: str, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        return [getattr(worker, method)(*args, **(kwargs or {}))]

    engine = VllmEngine.__new__(VllmEngine)
    engine._llm = mock.create_autospec(LLM, instance=True)
    engine._llm.llm_engine = mock.create_autospec(LLMEngine, instance=True)
    engine._llm.llm_engine.model_config = SimpleNamespace(max_model_len=64)
    engine._llm.collective_rpc.side_effect = collective_rpc
    engine._llm.sleep.side_effect = lambda level, mode: worker.sleep(level)
    engine._llm.wake_up.side_effect = lambda tags: worker.wake_up(tags)
    engine._placement = Placement("cuda", backend, sleeps=True, gpu_share=0.5)
    engine._asleep = set()
    engine._adapters = None
    engine._running, engine._version = {}, 0
    engine.watch = WorkerWatch(None, None)
    return engine
