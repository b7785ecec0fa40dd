"""New weights, from the training ranks to the engines: in buckets, never one call per parameter.

    sender = HostSender(weights, engines, nodes, world, bucket_bytes)      # on every training rank, once
    sender.send_weights()                                                  # on every rank, after each update

On CPUs a bucket is shared memory: the training rank writes it, the engines on its node copy out of it, and those on
other nodes get it through Ray's object store. Where a rank holds the parameters whole, and in the engine's type, they
move into shared memory for good, so that the engine's copy is the only one. On GPUs vLLM's own transfer does it: CUDA
IPC between processes that share GPUs, NCCL between separate ones. All have vLLM's four calls
(https://docs.vllm.ai/en/latest/training/weight_transfer/): init, start, update for each bucket, finish.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import ray
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_rl.rl.calls import ActorCall, Pending
from hpc_rl.training.distributed import World

if TYPE_CHECKING:
    from hpc_rl.rl.rollout.base import RolloutEngine

ALIGNMENT = 64
"""Bytes; where tensors begin in a bucket."""
IN_FLIGHT = 4
"""Buckets between sender and engines at a time; together they have the size that the user set."""


@dataclass(frozen=True)
class Slot:
    """One tensor in a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0
    """Its first byte in the bucket."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Segment:
    """A piece of another process's memory file on this node."""

    path: str
    inode: int
    """Tells a new file from an earlier one of the same path."""
    start: int
    nbytes: int

    def map(self) -> torch.Tensor:
        """Its bytes, uint8 [nbytes]. What the process has mapped once it keeps: page faults cost more than a copy."""
        return _map(self.path, self.inode)[self.start : self.start + self.nbytes]


@dataclass(frozen=True)
class Bucket:
    """Some of the weights."""

    slots: tuple[Slot, ...]
    data: Segment | NDArray[np.uint8]


class MemoryFile:
    """Shared memory without a name, which goes when the last process that has it mapped goes, however that ends."""

    def __init__(self, nbytes: int) -> None:
        self._descriptor = os.memfd_create("weights")
        os.ftruncate(self._descriptor, nbytes)
        self.bytes = torch.frombuffer(mmap.mmap(self._descriptor, nbytes), dtype=torch.uint8)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.inode = os.fstat(self._descriptor).st_ino

    def segment(self, start: int, nbytes: int) -> Segment:
        return Segment(self.path, self.inode, start, nbytes)

    def __del__(self) -> None:
        os.close(self._descriptor)


@cache
def _map(path: str, inode: int) -> torch.Tensor:
    descriptor = os.open(path, os.O_RDWR)
    try:
        found = os.fstat(descriptor)
        if found.st_ino != inode:
            raise FileNotFoundError(f"{path} is another file by now: its sender is gone")
        return torch.frombuffer(mmap.mmap(descriptor, found.st_size), dtype=torch.uint8)
    finally:
        os.close(descriptor)


class Weights:
    """A model's parameters by their Hugging Face names, tied ones once, in the engine's type: vLLM's WeightSource."""

    def __init__(self, hf: nn.Module, dtype: torch.dtype) -> None:
        self.parameters = dict(hf.named_parameters())
        self.dtype = dtype

    def metadata(self) -> list[Slot]:
        """What iteration will yield, without any communication."""
        return [Slot(name, self.dtype, tuple(parameter.shape)) for name, parameter in self.parameters.items()]

    def lie_whole(self) -> bool:
        """Whether iteration yields the parameters themselves, in host memory."""
        return all(
            not isinstance(parameter, DTensor)
            and (parameter.device.type, parameter.dtype) == ("cpu", self.dtype)
            and parameter.is_contiguous()
            for parameter in self.parameters.values()
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, one at a time. With sharded parameters all ranks iterate together."""
        for name, parameter in self.parameters.items():
            # Converted before they are gathered, so that fewer bytes travel.
            tensor = parameter.detach().to(self.dtype)
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plan(slots: Iterable[Slot], bucket_bytes: int) -> list[tuple[Slot, ...]]:
    """Lay tensors out in buckets, in their order; a tensor that is larger than a bucket has one of its own size."""
    buckets: list[list[Slot]] = []
    end = 0
    for slot in slots:
        if not buckets or (end + slot.nbytes > bucket_bytes):
            buckets.append([])
            end = 0
        buckets[-1].append(replace(slot, start=end))
        end = _aligned(end + slot.nbytes)
    return [tuple(bucket) for bucket in buckets]


def pack(weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Copies of tensors, in buckets in this process's own memory."""
    held: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if held and sum(other.nbytes for other in held.values()) + tensor.nbytes > bucket_bytes:
            yield _packed(held)
            held = {}
        held[name] = tensor
    if held:
        yield _packed(held)


def receive(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each slot: views of the bucket, valid until the call that brought it returns."""
    data = bucket.data.map() if isinstance(bucket.data, Segment) else _from_numpy(bucket.data)
    for slot in bucket.slots:
        yield slot.name, _view(data, slot)


class HostReceiver:
    """The four calls for an engine whose `load_weights` takes some of the weights at a time, in its own process."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def update_weights(self, update: Bucket) -> None:
        self._engine.load_weights(receive(update))

    def finish_weight_update(self) -> None:
        """Each bucket was in use at once."""


class Engines:
    """Engines in Ray actors that have the four calls: what vLLM calls a VLLMWeightSyncClient. May be sent to actors."""

    def __init__(self, actors: Sequence[Any], names: Sequence[str], timeout_s: float, workers_each: int = 1) -> None:
        """
        Args:
            actors: handles.
            names: of the actors, for errors.
            timeout_s: longest time for one call.
            workers_each: processes of one engine (tensor parallel size).

        All calls raise RunError where an engine died or did not answer in time.
        """
        self.actors = list(actors)
        self.names = list(names)
        self.timeout_s = timeout_s
        self.workers_each = workers_each

    def part(self, indices: Sequence[int]) -> Engines:
        actors, names = [self.actors[index] for index in indices], [self.names[index] for index in indices]
        return Engines(actors, names, self.timeout_s, self.workers_each)

    def calls(self, method: str, *arguments: Any) -> list[ActorCall]:
        """Start a call to every engine."""
        return [
            ActorCall(getattr(actor, method).remote(*arguments), name)
            for actor, name in zip(self.actors, self.names, strict=True)
        ]

    def call(self, method: str, *arguments: Any) -> Pending[list[Any]]:
        """Start a call to every engine; the results are in the engines' order."""
        return Pending.of_calls(self.calls(method, *arguments))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        calls: list[ActorCall] = []
        for index in range(len(self.actors)):
            own = dict(init_info)
            if "rank_offset" in own:  # vLLM counts the workers of one engine; these are several
                own["rank_offset"] += index * self.workers_each
            calls += self.part([index]).calls("init_weight_transfer_engine", own)
        Pending.of_calls(calls).wait(self.timeout_s)

    def start_weight_update(self) -> None:
        self.call("start_weight_update").wait(self.timeout_s)

    def update_weights(self, update: Any) -> None:
        self.call("update_weights", update).wait(self.timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update").wait(self.timeout_s)


class Sender(Protocol):
    def send_weights(self) -> None:
        """Give all engines the weights as they are now; back when they have them. Every training rank calls it."""
        ...


class HostSender:
    """A Sender through host memory. Made on every training rank."""

    def __init__(
        self, weights: Weights, engines: Engines, engine_nodes: Sequence[str], world: World, bucket_bytes: int
    ) -> None:
        """
        Args:
            engine_nodes: Ray's id of each engine's node.
            bucket_bytes: most bytes on their way at a time. A single larger tensor is let through.
        """
        self._weights = weights
        self._timeout_s = engines.timeout_s
        own = ray.get_runtime_context().get_node_id()
        rank_nodes = [own] * world.size
        if world.size > 1:
            dist.all_gather_object(rank_nodes, own)
        mine = deal(engine_nodes, rank_nodes)[world.rank]
        self._near = engines.part([index for index in mine if engine_nodes[index] == own])
        self._far = engines.part([index for index in mine if engine_nodes[index] != own])
        self._buckets = plan(weights.metadata(), bucket_bytes // IN_FLIGHT)
        self._shares = weights.lie_whole()
        self._places: list[tuple[MemoryFile, int]] = []
        """Memory of each bucket and where in it the bucket starts."""
        if mine:
            self._places = self._allocate()

    def send_weights(self) -> None:
        tensors = iter(self._weights)
        if not self._places:
            for _ in tensors:  # takes part in gathering
                pass
            return
        # An actor takes its calls in order, so only memory that is needed again is waited for, and the end.
        pending = [self._both("start_weight_update")]
        for slots, (memory, start) in zip(self._buckets, self._places, strict=True):
            while len(pending) >= IN_FLIGHT:
                pending.pop(0).wait(self._timeout_s)
            for slot in slots:
                self._write(slot, next(tensors)[1], memory.bytes[start:])
            pending.append(self._hand_out(slots, memory, start))
        pending.append(self._both("finish_weight_update"))
        for calls in pending:
            calls.wait(self._timeout_s)

    def _allocate(self) -> list[tuple[MemoryFile, int]]:
        sizes = [_aligned(slots[-1].start + slots[-1].nbytes) for slots in self._buckets]
        if self._shares:
            memory = MemoryFile(sum(sizes))
            return [(memory, sum(sizes[:index])) for index in range(len(sizes))]
        files = [MemoryFile(max(sizes[first::IN_FLIGHT])) for first in range(min(IN_FLIGHT, len(sizes)))]
        return [(files[index % IN_FLIGHT], 0) for index in range(len(sizes))]

    def _write(self, slot: Slot, tensor: torch.Tensor, place: torch.Tensor) -> None:
        target = _view(place, slot)
        if target.data_ptr() == tensor.data_ptr():
            return
        target.copy_(tensor)
        if self._shares:
            self._weights.parameters[slot.name].data = target

    def _hand_out(self, slots: tuple[Slot, ...], memory: MemoryFile, start: int) -> Pending[list[Any]]:
        nbytes = slots[-1].start + slots[-1].nbytes
        calls = self._near.calls("update_weights", Bucket(slots, memory.segment(start, nbytes)))
        if self._far.actors:
            copied = ray.put(Bucket(slots, memory.bytes[start : start + nbytes].numpy()))
            calls += self._far.calls("update_weights", copied)
        return Pending.of_calls(calls)

    def _both(self, method: str) -> Pending[list[Any]]:
        return Pending.of_calls(self._near.calls(method) + self._far.calls(method))


def deal(engine_nodes: Sequence[str], rank_nodes: Sequence[str]) -> list[list[int]]:
    """The engines that each rank serves: the first rank on an engine's node serves it; rank 0 where there is none."""
    served: list[list[int]] = [[] for _ in rank_nodes]
    for engine, node in enumerate(engine_nodes):
        served[rank_nodes.index(node) if node in rank_nodes else 0].append(engine)
    return served


def gpu_sender(
    backend: Literal["ipc", "nccl"], weights: Weights, engines: Engines, world: World, bucket_bytes: int, endpoint: str
) -> Sender:
    """vLLM's transfer between GPUs; every training rank calls this at the same time, while the engines are up.

    Args:
        backend: ipc where training ranks and engines share GPUs, nccl where they have their own.
        bucket_bytes: of one buffer on the GPU; ipc has one, nccl two.
        endpoint: `host:port` of rank 0, free, for nccl.
    """
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    # ipc refuses a tensor that is larger than its buffer.
    size = max(bucket_bytes, *(slot.nbytes for slot in weights.metadata()))
    info: IPCTrainerInitInfo | NCCLTrainerInitInfo
    if backend == "ipc":
        info = IPCTrainerInitInfo(rank=world.rank, packed=True, packed_buffer_size_bytes=size)
    else:
        host, port = endpoint.rsplit(":", 1)
        workers = len(engines.actors) * engines.workers_each
        info = NCCLTrainerInitInfo(host, int(port), 1 + workers, rank=world.rank, packed_buffer_size_bytes=size)
    sender: Sender = WeightTransferTrainerFactory.trainer_init(info, client=engines, source=weights)
    return sender


def _packed(tensors: dict[str, torch.Tensor]) -> Bucket:
    slots = plan((Slot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()), 1 << 62)[0]
    data = torch.empty(_aligned(slots[-1].start + slots[-1].nbytes), dtype=torch.uint8)
    for slot in slots:
        _view(data, slot).copy_(tensors[slot.name])
    return Bucket(slots, data.numpy())


def _view(data: torch.Tensor, slot: Slot) -> torch.Tensor:
    return data[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape)


def _from_numpy(data: NDArray[np.uint8]) -> torch.Tensor:
    """Without a copy. Ray's arrays are read-only, which torch warns about; `receive` promises no writable views."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(data)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
