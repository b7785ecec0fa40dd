"""vLLM's own classes without a GPU: the calls that would reach CUDA or NCCL are replaced, everything else is vLLM's."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.vllm import VllmEngine
from hpc_rl.rl.rollout.vllm_worker import WeightUpdates
from hpc_rl.rl.weights.base import EngineActors

TIMEOUT_S = 600
CPU = torch.device("cpu")
UNIQUE_ID = bytes(range(128))


class Model(nn.Module):
    """Stands for a model of vLLM: it loads weights by name through their weight loaders, and returns the names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
            loaded.add(name)
        return loaded


class Bus:
    """Stands for a NCCL communicator: a broadcast of rank 0 reaches the other side through a queue."""

    def __init__(self) -> None:
        self._sent: queue.Queue[torch.Tensor] = queue.Queue()

    def join(self, unique_id: bytes, rank: int) -> Any:
        assert unique_id == UNIQUE_ID
        return self.receiver() if rank else self.sender()

    def sender(self) -> Any:
        return SimpleNamespace(broadcast=lambda tensor, src, **_: self._sent.put(tensor.clone()))

    def receiver(self) -> Any:
        def broadcast(tensor: torch.Tensor, src: int, **_: Any) -> None:
            tensor.copy_(self._sent.get(timeout=TIMEOUT_S))

        return SimpleNamespace(broadcast=broadcast, destroy=lambda: None)


class PretendedNccl:
    """Stands for the library: it makes the id of a new communicator."""

    def ncclGetUniqueId(self) -> Any:
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

        return ncclUniqueId.from_buffer_copy(UNIQUE_ID)


@contextlib.contextmanager
def pretended_cuda() -> Iterator[None]:
    """Replace what asks CUDA, in torch and in vLLM's weight transfers. Tensors stay in host memory."""
    from vllm.distributed.device_communicators import pynccl_wrapper
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    properties = SimpleNamespace(uuid="GPU-0")
    exported: dict[int, torch.Tensor] = {}
    bus = Bus()

    def export(tensor: torch.Tensor) -> tuple[None, tuple[int, ...]]:
        exported[len(exported)] = tensor
        return None, (len(exported) - 1, *range(7))

    def on_cpu(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    empty = torch.empty
    anything = mock.MagicMock
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, **values: Any) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value))

        replace(torch, empty=on_cpu, Event=anything)
        replace(torch.Tensor, record_stream=lambda *_: None)
        replace(torch.cuda, get_device_properties=lambda *_: properties, ipc_collect=lambda: None)
        replace(torch.cuda, current_device=lambda: 0, Stream=anything, Event=anything, stream=anything())
        replace(torch.cuda, synchronize=lambda *_: None, current_stream=anything())
        replace(
            torch.accelerator, synchronize=lambda *_: None, current_device_index=lambda: 0, current_stream=anything()
        )
        replace(torch.accelerator, get_memory_info=lambda *_: (10**9, 10**9))
        replace(packed_tensor, reduce_tensor=export)
        replace(torch.multiprocessing.reductions, rebuild_cuda_tensor=lambda handle, *_: exported[handle])
        replace(pynccl_wrapper, NCCLLibrary=PretendedNccl)
        replace(nccl_common, uid_init_process_group=lambda unique_id, rank, *_: bus.join(unique_id, rank))
        yield


def make_worker(backend: str, model: nn.Module) -> Any:
    """Return vLLM's GPU worker with our methods mixed in, around a model, without a device."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
    from vllm.v1.worker.gpu_worker import Worker

    taken = [name for name in vars(WeightUpdates) if not name.startswith("__") and hasattr(Worker, name)]
    assert not taken, f"vLLM's worker has methods of these names itself: {taken}"

    class ExtendedWorker(Worker, WeightUpdates):
        def __init__(self) -> None:
            self.vllm_config = mock.MagicMock()
            self.model_config = self.vllm_config.model_config
            self.parallel_config = self.vllm_config.parallel_config
            self.rank = 0
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
    return engine


class DirectEngines(EngineActors):
    """The client that senders call, with an engine in this process instead of in an actor."""

    def __init__(self, engine: VllmEngine) -> None:
        super().__init__([None], ["engine"], ["node"], TIMEOUT_S)
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._engine.start_weight_update()

    def update_weights(self, update: Any) -> None:
        self._engine.update_weights(update)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.finish_weight_update()
