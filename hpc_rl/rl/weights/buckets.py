"""Buckets: many tensors in one piece of memory, so that weights travel in few calls rather than one per parameter.

A sender plans the buckets once (`plan_buckets`), or packs copies of tensors (`pack`); a receiver gets tensors back with
`unpack`. The memory of a bucket is an array, or a `Segment` of a `MemoryFile` that processes of one node share.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 64
"""Tensors in a bucket begin at multiples of this many bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    """Position of its first byte in the bucket."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of a bucket's memory, uint8 [bytes]."""
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Segment:
    """A part of another process's MemoryFile on the same node."""

    path: str
    inode: int
    """Distinguishes a new file from an earlier one at the same path."""
    start: int
    nbytes: int

    def map(self) -> torch.Tensor:
        """Return its bytes, uint8 [nbytes].

        A process keeps the files that it has mapped, because page faults cost more than a copy.

        Raises:
            FileNotFoundError: the process that owns the file has ended.
        """
        return _map(self.path, self.inode)[self.start : self.start + self.nbytes]


@dataclass(frozen=True)
class Bucket:
    """Some of the weights."""

    entries: tuple[TensorEntry, ...]
    data: Segment | NDArray[np.uint8]


class MemoryFile:
    """Shared memory without a name: the kernel frees it when the last process that maps it ends, however it ends."""

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
            raise FileNotFoundError(f"{path} is now another file: the process that shared it has ended")
        return torch.frombuffer(mmap.mmap(descriptor, found.st_size), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def plan_buckets(entries: Iterable[TensorEntry], bucket_bytes: int) -> list[tuple[TensorEntry, ...]]:
    """Assign tensors to buckets, in order. A tensor that is larger than a bucket gets a bucket of its own size."""
    buckets: list[list[TensorEntry]] = []
    end = 0
    for entry in entries:
        if not buckets or end + entry.nbytes > bucket_bytes:
            buckets.append([])
            end = 0
        buckets[-1].append(replace(entry, offset=end))
        end = aligned(end + entry.nbytes)
    return [tuple(bucket) for bucket in buckets]


def used_bytes(entries: tuple[TensorEntry, ...]) -> int:
    """Return the size of a planned bucket."""
    return entries[-1].offset + entries[-1].nbytes


def pack(weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Copy tensors into buckets in this process's own memory."""
    held: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if held and sum(other.nbytes for other in held.values()) + tensor.nbytes > bucket_bytes:
            yield _packed(held)
            held = {}
        held[name] = tensor
    if held:
        yield _packed(held)


def unpack(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each entry. Tensors are views, valid until the call that brought the bucket returns."""
    memory = bucket.data.map() if isinstance(bucket.data, Segment) else _from_numpy(bucket.data)
    for entry in bucket.entries:
        yield entry.name, entry.view(memory)


def aligned(nbytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _packed(tensors: dict[str, torch.Tensor]) -> Bucket:
    (entries,) = plan_buckets((TensorEntry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()), 1 << 62)
    memory = torch.empty(aligned(used_bytes(entries)), dtype=torch.uint8)
    for entry in entries:
        entry.view(memory).copy_(tensors[entry.name])
    return Bucket(entries, memory.numpy())


def _from_numpy(data: NDArray[np.uint8]) -> torch.Tensor:
    """Wrap an array without a copy. Arrays from Ray are read-only, about which torch warns; nothing writes to them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(data)
