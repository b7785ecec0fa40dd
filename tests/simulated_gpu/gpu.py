"""Simulated GPUs for the code inside a `with` block, and what that code did with them."""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_rl.training.models import compiled, loading, routers
from tests.simulated_gpu.patches import replaced_parts_of_torch

_WITHOUT_KERNEL = frozenset(
    {
        "_reshape_alias",
        "_unsafe_view",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
    }
)
"""Operators without arithmetic that are not declared as views."""


class Gpu(TorchDispatchMode):
    """Rank 0's GPU. It counts the bytes of all storages on device `cuda`, collectives, and waits of the host."""

    def __init__(self, where: bool = False) -> None:
        super().__init__()
        self.live = 0
        """Bytes in use."""
        self.peak = 0
        """Largest value of `live` since the start or `reset_peak`."""
        self.traffic: Counter[str] = Counter()
        """Bytes of the largest tensor of each collective's calls, by its name: for all-gather the output."""
        self.calls: Counter[str] = Counter()
        """Number of each collective's calls."""
        self.waits: Counter[str] = Counter()
        """Number of times that the host read a value of a tensor, by file:line of this project."""
        self.launches: Counter[str] = Counter()
        """Number of calls of each operator that computes or copies on the GPU: at least one kernel each."""
        self.at_peak: list[tuple[float, str]] = []
        """With `where`: the largest origins at the peak; see `largest`."""
        self.tensors = FakeTensorMode(allow_non_fake_inputs=True)
        self.paused = False
        """Set while DTensor computes shapes with whole tensors, which would not exist on a GPU."""
        self._where = where
        self._bytes: dict[int, int] = {}
        self._origin: dict[int, str] = {}

    def reset(self) -> None:
        """Forget collectives, waits, launches, and all peaks before now."""
        self.peak = self.live
        self.traffic.clear()
        self.calls.clear()
        self.waits.clear()
        self.launches.clear()

    def largest(self, count: int = 12) -> list[tuple[float, str]]:
        """Return live memory, in 10^9 bytes, by the code that allocated it. Needs `where`."""
        total: Counter[str] = Counter()
        for key, size in self._bytes.items():
            total[self._origin.get(key, "?")] += size
        return [(round(size / 1e9, 3), place) for place, size in total.most_common(count)]

    def saw_wait(self) -> None:
        """Count a wait of the host, by the innermost line of this project."""
        frames = [frame for frame in traceback.extract_stack() if "hpc_rl" in frame.filename]
        if frames:
            self.waits[_place(frames[-1])] += 1

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed."""
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = 0
            if self._where:
                known = ("hpc_rl", "fsdp", "modeling_")
                frames = [f for f in traceback.extract_stack() if any(part in f.filename for part in known)]
                self._origin[key] = " < ".join(_place(frame) for frame in frames[::-1][:3])
            weakref.finalize(storage, self._freed, key)
        self._resize(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage."""
        if storage._cdata in self._bytes:
            self._resize(storage._cdata, storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors arrive here too
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            sizes = [t.numel() * t.itemsize for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
            self.traffic[func._schema.name.partition("::")[2]] += max(sizes, default=0)
            self.calls[func._schema.name.partition("::")[2]] += 1
        elif not self.paused and _launches(func) and any(map(_on_gpu, tree_leaves((args, out)))):
            self.launches[func._schema.name] += 1
        for tensor in () if self.paused else filter(_on_gpu, tree_leaves(out)):
            self.see(tensor.untyped_storage())
        return out

    def _resize(self, key: int, size: int) -> None:
        self.live += size - self._bytes[key]
        self._bytes[key] = size
        if self.live > self.peak:
            self.peak = self.live
            if self._where:
                self.at_peak = self.largest()

    def _freed(self, key: int) -> None:
        self.live -= self._bytes.pop(key)
        self._origin.pop(key, None)


@contextlib.contextmanager
def simulated_gpus(ranks: int, gpus_per_node: int = 8, where: bool = False) -> Iterator[Gpu]:
    """Make this process rank 0 of a process group with one GPU per rank. Call it inside of `simulate`.

    Args:
        where: record which code allocates what, for `Gpu.largest` and `Gpu.at_peak`; slow.
    """
    gpu = Gpu(where)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        # Fake tensors cannot try the compiler, and have no numbers to compare.
        with (
            mock.patch.object(compiled, "is_automatic", lambda *_: False),
            mock.patch.object(loading, "check_packing", lambda *_: None),
            mock.patch.object(routers, "_count", lambda *_: None),
            mock.patch.object(routers.Routers, "take_metrics", lambda *_: {}),
            replaced_parts_of_torch(gpu, gpus_per_node),
            torch.autograd.set_multithreading_enabled(False),  # another thread makes real tensors
            gpu.tensors,
            gpu,
        ):
            yield gpu
    finally:
        dist.destroy_process_group()


def _on_gpu(value: object) -> bool:
    return isinstance(value, FakeTensor) and value.device.type == "cuda"


def _launches(func: Any) -> bool:
    """Return whether an operator does more than to describe or to reserve memory."""
    return func.namespace != "prim" and not func.is_view and func._schema.name.partition("::")[2] not in _WITHOUT_KERNEL


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
