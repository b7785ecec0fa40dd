"""What passes between the processes of a job without GPUs: GPU memory that they share, NCCL, and calls of engines.

Everything is in a folder of the job: memory in files, communicators over gloo, calls over sockets.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import vllm.v1.worker.gpu_worker  # noqa: F401 - the processes are forked after it
from vllm.distributed.device_communicators import pynccl_wrapper
from vllm.distributed.weight_transfer import (
    ipc_engine,  # noqa: F401
    nccl_common,
    nccl_engine,  # noqa: F401
    packed_tensor,
)

from hpc_rl.errors import UserError
from hpc_rl.rl.weights import base
from tests.simulated_gpu.record import note, note_collective

TIMEOUT_S = 600


@contextlib.contextmanager
def connected(folder: Path, number: int) -> Iterator[None]:
    """Let vLLM's transfers of this process reach the other processes of the job.

    Args:
        number: the process's, in the job.
    """
    memory = GpuMemory(folder)

    def join(unique_id: bytes, rank: int, size: int, _device: Any) -> Communicator:
        return Communicator(folder, unique_id, rank, size, number)

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (packed_tensor, "torch", TorchOnGpu(memory)),
            (packed_tensor, "reduce_tensor", memory.reduce_tensor),
            (torch.multiprocessing.reductions, "rebuild_cuda_tensor", memory.rebuild_cuda_tensor),
            (pynccl_wrapper, "NCCLLibrary", Nccl),
            (nccl_common, "uid_init_process_group", join),
            (base, "Pending", Answers),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


class GpuMemory:
    """Memory of this process's GPU: files that other processes may map by a handle, as by cudaIpcGetMemHandle."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[int, Path] = {}
        self._numbers = itertools.count()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes]."""
        path = self._folder / f"gpu-{torch.cuda.current_device()}-{os.getpid()}-{next(self._numbers)}"
        with path.open("xb") as file:
            file.truncate(nbytes)
        tensor = _map(path)
        self._paths[tensor.data_ptr()] = path
        return tensor

    def reduce_tensor(self, tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        """Return what torch.multiprocessing.reductions.reduce_tensor does for a CUDA tensor."""
        handle = self._paths[tensor.data_ptr()].name.encode()
        storage = (type(tensor._typed_storage()), tensor.dtype, torch.cuda.current_device(), handle, tensor.nbytes, 0)
        counters = (tensor.requires_grad, b"counter", 0, b"event", True)
        return None, (type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset(), *storage, *counters)

    def rebuild_cuda_tensor(self, *arguments: Any) -> torch.Tensor:
        """Return the tensor of a handle; see torch.multiprocessing.reductions. Only processes on its GPU can map it."""
        kind, size, stride, offset, storage, dtype, _device, handle, *_ = arguments
        assert (kind, storage, dtype) == (torch.Tensor, torch.storage.TypedStorage, torch.uint8)
        gpu = int(handle.split(b"-")[1])
        assert gpu == torch.cuda.current_device(), f"GPU {torch.cuda.current_device()} maps memory of GPU {gpu}"
        return _map(self._folder / handle.decode()).as_strided(size, stride, offset)


def _map(path: Path) -> torch.Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class TorchOnGpu:
    """The module torch, but memory of device `cuda` is the GPU's."""

    def __init__(self, memory: GpuMemory) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """See torch.empty."""
        if str(device) != "cuda":
            return torch.empty(size, dtype=dtype, device=device)
        assert dtype is torch.uint8
        return self._memory.allocate(size)


class Nccl:
    """Stands for the library: it makes the id of a new communicator."""

    def ncclGetUniqueId(self) -> Any:
        return pynccl_wrapper.ncclUniqueId.from_buffer_copy(os.urandom(128))


class Communicator:
    """Stands for vLLM's PyNcclCommunicator, over gloo. It is recorded like torch's groups.

    Args:
        number: the process's, in the job.
    """

    def __init__(self, folder: Path, unique_id: bytes, rank: int, size: int, number: int) -> None:
        self.name = f"nccl {unique_id[:4].hex()}"
        store = dist.FileStore(str(folder / self.name), size)
        store.set_timeout(timedelta(seconds=TIMEOUT_S))
        store.set(f"number {rank}", str(number))
        self._numbers = [int(store.get(f"number {other}")) for other in range(size)]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """See PyNcclCommunicator."""
        assert stream is None and self._gloo is not None, "the communicator is closed"
        note_collective("broadcast", self.name, self._numbers, [tensor], f"root {src}")
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        """See PyNcclCommunicator."""
        note("destroy", self.name)
        self._gloo = None


@dataclass(frozen=True)
class EngineHandle:
    """Stands for Ray's handle of an engine's actor: `handle.method.remote(...)` calls the engine's processes."""

    folder: Path
    numbers: tuple[int, ...]
    """Of its processes, in the job."""

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return Method(self, method)


@dataclass(frozen=True)
class Method:
    handle: EngineHandle
    name: str

    def remote(self, *arguments: Any) -> list[Connection]:
        """Call the method in all processes of the engine at once."""
        return [_called(self.handle.folder, number, self.name, arguments) for number in self.handle.numbers]


def _called(folder: Path, number: int, method: str, arguments: Sequence[Any]) -> Connection:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            connection = Client(str(folder / f"engine-{number}"))
            break
        except (FileNotFoundError, ConnectionRefusedError):  # it does not listen yet
            assert time.monotonic() < deadline, f"process {number} does not listen after {TIMEOUT_S} s"
            time.sleep(0.01)
    connection.send((method, arguments))
    return connection


class Answers:
    """Stands for `Pending.of_calls`: the answers of engines."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self._connections = [connection for call in calls for connection in call.ref]

    of_calls = classmethod(lambda cls, calls: cls(calls))

    def wait(self, timeout_s: float) -> list[Any]:
        """Return the answers. Raises UserError if an engine did."""
        found = []
        for connection in self._connections:
            assert wait([connection], timeout_s), "an engine has not answered in time"
            answer, error = connection.recv()
            if error is not None:
                raise UserError(error)
            found.append(answer)
        return found


def serve(folder: Path, number: int, methods: Callable[[str], Callable[..., Any]]) -> None:
    """Answer calls, one after another, until `stop` is called.

    Args:
        methods: returns a method by its name.
    """
    with Listener(str(folder / f"engine-{number}")) as listener:
        while True:
            with listener.accept() as connection:
                method, arguments = connection.recv()
                try:
                    connection.send((None if method == "stop" else methods(method)(*arguments), None))
                except UserError as error:
                    connection.send((None, str(error)))
                if method == "stop":
                    return
