"""Tensors that leave the device while nothing uses them, and wait in host memory (trainer.offload).

    offloaded = OffloadedTensors(tensors)    # on the device
    offloaded.leave()                        # in host memory; the device memory is free
    with offloaded.back():                   # on the device, until the end of the block
        optimizer.step()

A tensor keeps its identity: its storage on the device shrinks to nothing and grows again, so that FSDP, optimizer and
checkpoints need not be told. The copy to the host overlaps with what the device computes next, until other tensors come
back: its memory is free only after it. The host waits for copies to the device: others read the tensors on streams of
their own, such as transfers of weights.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from hpc_rl.config.training.common import OFFLOAD_BYTES, Offload
from hpc_rl.training.models.causal_lm import PackedModel
from hpc_rl.training.parallel.sharding import is_divided, own_part, reshard
from hpc_rl.training.parallel.side_stream import SideStream
from hpc_rl.training.param_groups import only

_ALIGNED = 64
"""Bytes of which the place of each tensor in a buffer is a multiple."""
_departures: list[Any] = []
"""Events at the end of copies to the host: the device memory of what has left is free after them."""


class OffloadedTensors:
    """Some tensors that move together. Those that share a storage have to be given once.

    Args:
        tensors: on one device. Of a DTensor, this rank's part moves.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [own_part(tensor) for tensor in tensors]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]
        """Bytes of their storages, which FSDP makes equally long on all ranks."""
        self._copies: list[torch.Tensor] = []
        """In host memory, from the first move on; page-locked for an accelerator."""
        self._away = False
        self._side = SideStream(self._tensors[0].device if self._tensors else torch.device("cpu"))
        self._arrived: Any = None
        """Event at the end of the latest copies to the device, until it has been awaited."""

    @property
    def is_away(self) -> bool:
        """Whether the tensors are in host memory only."""
        return self._away

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors take of the device, and then of the host."""
        return sum(self._sizes)

    def leave(self, changed: bool = True) -> None:
        """Move the tensors to host memory.

        Args:
            changed: whether they may have changed since they came back. Otherwise the copies are still right.
        """
        if self._away or not self._tensors:
            return
        with self._side.copying():
            if not self._copies:
                self._copies = _host_copies(self._tensors, pinned=self._side.pins)
                changed = True
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                if changed:
                    copy.copy_(tensor, non_blocking=True)
                if self._side.stream is not None:
                    tensor.record_stream(self._side.stream)  # nobody else gets the memory before it has been read
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        if (departure := self._side.mark()) is not None:
            _departures.append(departure)
        self._away = True

    def come_back(self) -> None:
        """Begin to move the tensors to the device. `arrive` waits for them."""
        if not self._away:
            return
        while _departures:  # otherwise, those that leave and those that come would be on the device together
            _departures.pop().synchronize()
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            tensor.untyped_storage().resize_(size)
        with self._side.copying():
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(copy, non_blocking=True)
        self._arrived = self._side.mark()
        self._away = False

    def arrive(self) -> None:
        """Have the tensors on the device, and wait for them."""
        self.come_back()
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    @contextmanager
    def back(self, changed: bool = True) -> Iterator[None]:
        """Have the tensors on the device within the block. If they were away before, they leave at its end.

        Args:
            changed: whether the block may change them.
        """
        was_away = self._away
        self.arrive()
        try:
            yield
        finally:
            if was_away:
                self.leave(changed)


class ModelOffload:
    """What trainer.offload moves of a model, and when. What moves is in host memory between the blocks.

    Args:
        level: trainer.offload.
        optimizer: AdamW of a model that is trained.
    """

    def __init__(self, level: Offload, model: PackedModel, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model = model
        self._optimizer = optimizer
        # Without parts or copies, the weights may belong to an engine too.
        moves_weights = level == "all" and is_divided(model)
        self._weights = OffloadedTensors(model.parameters() if moves_weights else ())
        parts = [] if level == "none" or optimizer is None else parts_of(optimizer)
        self._moments = [(part, OffloadedTensors(moments_of(optimizer, part))) for part in parts]
        """Some parameters, and their moments."""
        if moves_weights:
            reshard(model)
        self._weights.leave()
        for _, moments in self._moments:
            moments.leave()

    @contextmanager
    def computing(self, changed: bool = False) -> Iterator[None]:
        """Have the weights on the device.

        Args:
            changed: whether the block changes them.
        """
        with self._weights.back(changed):
            try:
                yield
            finally:
                reshard(self._model)

    def step(self) -> None:
        """Take a step of the optimizer. Moments that are in host memory come part by part: while one part leaves, the
        next one comes, so that the device holds two."""
        assert self._optimizer is not None
        if not self._moments:
            self._optimizer.step()
            return
        for index, (part, moments) in enumerate(self._moments):
            moments.arrive()
            with only(self._optimizer, part):
                self._optimizer.step()
            for _, following in self._moments[index + 1 : index + 2]:
                following.come_back()
            moments.leave()

    @contextmanager
    def whole(self, changed: bool = False) -> Iterator[None]:
        """Have weights and moments on the device, for a checkpoint."""
        with self.computing(changed), ExitStack() as stack:
            for _, moments in self._moments:
                stack.enter_context(moments.back(changed))
            yield


def parts_of(optimizer: torch.optim.Optimizer, most_bytes: int = OFFLOAD_BYTES) -> list[set[nn.Parameter]]:
    """Return the parameters of an optimizer in parts, each with moments of at most so many bytes on this rank, or with
    one parameter."""
    parts: list[set[nn.Parameter]] = []
    left = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            size = sum(own_part(tensor).nbytes for tensor in moments_of(optimizer, [parameter]))
            if not parts or size > left:
                parts.append(set())
                left = most_bytes
            parts[-1].add(parameter)
            left -= size
    return parts


def moments_of(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the tensors of AdamW's two moments of each of these parameters."""
    states = (optimizer.state[parameter] for parameter in parameters)
    return [tensor for state in states for name, tensor in state.items() if name != "step"]


def _host_copies(tensors: list[torch.Tensor], pinned: bool) -> list[torch.Tensor]:
    """Return tensors in host memory of the same types and shapes. They share buffers of up to 1 GiB: torch rounds the
    size of each page-locked buffer up to a power of two."""
    copies: list[torch.Tensor] = []
    waiting = list(tensors)
    while waiting:
        sizes = [-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in waiting]
        ends = list(accumulate(sizes))
        count = max(1, bisect_right(ends, OFFLOAD_BYTES))
        buffer = torch.empty(ends[count - 1], dtype=torch.uint8, device="cpu", pin_memory=pinned)
        for tensor, size, end in zip(waiting[:count], sizes, ends, strict=False):
            start = end - size
            copies.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        del waiting[:count]
    return copies
