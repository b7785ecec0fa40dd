"""The parts of torch that ask a real GPU, replaced for the duration of a simulation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from tests.simulated_gpu.gpu import Gpu

GPU_NAME = "NVIDIA H100 80GB HBM3"
GPU_BYTES = 80 * 10**9


@contextlib.contextmanager
def replaced_parts_of_torch(gpu: Gpu, gpus_per_node: int) -> Iterator[None]:
    """Replace what would ask a real GPU, and what would look inside of a tensor."""
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, replacements: dict[str, Any]) -> None:
            for name, value in replacements.items():
                stack.enter_context(mock.patch.object(owner, name, value))

        replace(torch.cuda, _cuda(gpu, gpus_per_node))
        replace(torch.accelerator, _accelerator(gpu, gpus_per_node))
        replace(torch.Tensor, _tensor_methods(gpu))
        replace(FakeTensor, {"tolist": _fake_tolist(gpu)})
        replace(FakeTensorMode, {"avoid_device_init": True})  # constants move as fake tensors
        replace(torch, {"from_numpy": _faked(gpu, torch.from_numpy)})
        replace(torch.UntypedStorage, {"resize_": _counted_resize(gpu, torch.UntypedStorage.resize_)})
        replace(_fsdp_init, {"_move_states_to_device": _move_states_to_device(gpu)})
        shapes = "_propagate_tensor_meta_non_cached"
        replace(ShardingPropagator, {shapes: _uncounted(gpu, getattr(ShardingPropagator, shapes))})
        # A mesh computes with its tensor of ranks, so that this tensor has to be a real one.
        init = device_mesh.init_device_mesh
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("init_device_mesh") is init:
                replace(module, {"init_device_mesh": _outside_of_the_simulation(init)})
        replace(DeviceMesh, {"from_group": _outside_of_the_simulation(DeviceMesh.from_group)})
        yield


class _Nothing:
    """Stands for a stream, an event, or a context of one. Every method returns the object itself."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self

    def query(self) -> bool:
        """Return whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being recorded."""
        return False


def _cuda(gpu: Gpu, gpus_per_node: int) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: gpus_per_node,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda *_: gpu.peak,
        "memory_allocated": lambda *_: gpu.live,
        "mem_get_info": lambda *_: (GPU_BYTES - gpu.live, GPU_BYTES),
        "get_device_name": lambda *_: GPU_NAME,
        "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda *_: None,
        "Stream": _Nothing,
        "Event": _Nothing,
        "stream": _Nothing,
        "current_stream": _Nothing,
        "default_stream": _Nothing,
    }


def _accelerator(gpu: Gpu, gpus_per_node: int) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: gpus_per_node,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "set_device_index": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda *_: gpu.peak,
        "memory_allocated": lambda *_: gpu.live,
        "get_memory_info": lambda *_: (GPU_BYTES - gpu.live, GPU_BYTES),
        "current_stream": _Nothing,
    }


def _tensor_methods(gpu: Gpu) -> dict[str, Any]:
    """Return methods that give 1 for every element of a fake tensor, and count the wait of the host."""
    tensor = torch.Tensor
    item, as_float, as_bool = tensor.item, tensor.__float__, tensor.__bool__
    to, cpu, numpy = tensor.to, tensor.cpu, tensor.numpy

    def fake_item(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor | DTensor):
            return item(self)
        wait(self)
        return 1.0 if self.is_floating_point() else 1

    def fake_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return numpy(self, *args, **kwargs)
        if self.device.type != "cpu":
            raise TypeError(f"can't convert {self.device} device type tensor to numpy")
        return np.zeros(tuple(self.shape), str(self.dtype).removeprefix("torch."))

    def wait(self: torch.Tensor) -> None:
        if self.device.type == "cuda":
            gpu.saw_wait()

    def waiting(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Count copies to the CPU that do not return before they are done."""

        def copy(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            out = method(self, *args, **kwargs)
            if out.device.type == "cpu" and not kwargs.get("non_blocking"):
                wait(self)
            return out

        return copy

    return {
        "item": fake_item,
        "__float__": lambda self: float(fake_item(self)) if isinstance(self, FakeTensor) else as_float(self),
        "__bool__": lambda self: bool(fake_item(self)) if isinstance(self, FakeTensor) else as_bool(self),
        "numpy": fake_numpy,
        "cpu": waiting(cpu),
        "to": waiting(to),
        "record_stream": lambda self, stream: None,
    }


def _fake_tolist(gpu: Gpu) -> Callable[[torch.Tensor], Any]:
    def tolist(self: torch.Tensor) -> Any:
        if self.device.type == "cuda":
            gpu.saw_wait()
        ones: Any = 1.0 if self.is_floating_point() else 1
        for size in reversed(self.shape):
            ones = [ones] * size
        return ones

    return tolist


def _faked(gpu: Gpu, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: gpu.tensors.from_tensor(function(*args))


def _counted_resize(gpu: Gpu, resize: Callable[..., Any]) -> Callable[..., Any]:
    def counted(self: torch.UntypedStorage, size: int) -> Any:
        out = resize(self, size)
        gpu.resized(self)
        return out

    return counted


def _move_states_to_device(gpu: Gpu) -> Callable[..., None]:
    """Return a function that moves fake tensors in place: assigning `.data` would keep their old device."""

    def move(params: Any, buffers: Any, device: torch.device, *_: Any, **__: Any) -> None:
        for tensor in (*params, *buffers):
            if isinstance(tensor, FakeTensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                tensor.fake_device = device
                gpu.see(tensor.untyped_storage())

    return move


def _uncounted(gpu: Gpu, function: Callable[..., Any]) -> Callable[..., Any]:
    def uncounted(*args: Any, **kwargs: Any) -> Any:
        gpu.paused = True
        try:
            return function(*args, **kwargs)
        finally:
            gpu.paused = False

    return uncounted


def _outside_of_the_simulation(function: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside
