"""Process groups over gloo that write down each collective before it begins, in whatever thread it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from tests.simulated_gpu.record import note_collective

NAME = "recorded"
"""torch's name of this backend."""

_COMMON: dict[str, Callable[..., list[torch.Tensor]]] = {
    "allreduce": lambda tensors, *_: tensors,
    "allreduce_coalesced": lambda tensors, *_: tensors,
    "broadcast": lambda tensors, *_: tensors,
    "reduce": lambda tensors, *_: tensors,
    "send": lambda tensors, *_: tensors,
    "recv": lambda tensors, *_: tensors,
    "recv_anysource": lambda tensors, *_: tensors,
    "allgather": lambda _, tensors, *__: tensors,
    "all_gather_single": lambda _, tensor, *__: [tensor],
    "all_gather_single_coalesced": lambda _, tensors, *__: tensors,
    "gather": lambda _, tensors, *__: tensors,
    "scatter": lambda tensors, *_: tensors,
    "reduce_scatter": lambda tensors, *_: tensors,
    "reduce_scatter_single": lambda tensor, *_: [tensor],
    "reduce_scatter_single_coalesced": lambda tensors, *_: tensors,
    "alltoall": lambda *_: [],
    "all_to_all_single": lambda _, tensor, to, own, *__: [] if to or own else [tensor],
    "barrier": lambda *_: [],
}
"""The collectives, and which of their tensors have the same shape on all ranks."""


class RecordedGroup(dist.ProcessGroup):
    """A process group whose collectives are those of gloo."""

    def __init__(self, options: Any, _: Any = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._name: str = options.group_id
        self._ranks: list[int] = list(options.global_ranks_in_group) or list(range(options.group_size))
        gloo = dist.ProcessGroup.BackendType.GLOO
        self._gloo = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        self._gloo._set_default_backend(gloo)
        backend = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        backend._set_sequence_number_for_group()
        self._gloo._register_backend(torch.device("cpu"), gloo, backend)

    @property
    def group_name(self) -> str:
        """torch finds the group by this name."""
        return self._name

    def getBackendName(self) -> str:
        """Return torch's name of this backend."""
        return NAME

    def shutdown(self) -> None:
        """Close the connections."""
        self._gloo.shutdown()


def _recorded(name: str, common: Callable[..., list[torch.Tensor]]) -> Callable[..., Any]:
    def collective(self: RecordedGroup, *arguments: Any, **named: Any) -> Any:
        # dist.* names at most the options.
        options = named.get("opts", arguments[-1] if arguments else None)
        words = [options.reduceOp.op.name] if hasattr(options, "reduceOp") else []
        if (root := getattr(options, "rootRank", None)) is not None:
            words.append(f"root {root}")
        if name in ("send", "recv"):
            words = [str(self._ranks[arguments[1]])]
        note_collective(name, self._name, self._ranks, common(*arguments), " ".join(words))
        host = [tree_map_only(torch.Tensor, _on_host, one) for one in arguments]
        if words[:1] == ["AVG"]:  # which gloo does not have
            options.reduceOp = dist.ReduceOp.SUM
            divide = torch.Tensor.div_ if name.startswith("allreduce") else torch.Tensor.div
            host[-2] = tree_map_only(torch.Tensor, lambda tensor: divide(tensor, self.size()), host[-2])
        return getattr(self._gloo, name)(*host, **named)

    return collective


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the CPU over the same memory."""
    return tensor if tensor.device.type == "cpu" else torch.ops.simulated.host(tensor)


for _name, _common in _COMMON.items():
    setattr(RecordedGroup, _name, _recorded(_name, _common))
dist.Backend.register_backend(NAME, RecordedGroup, extended_api=True, devices=["cpu", "cuda"])


@contextmanager
def recorded_groups() -> Iterator[None]:
    """Let torch make recorded groups where a program requests gloo or NCCL."""

    def translated(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if arguments and isinstance(arguments[0], str):
                arguments = (NAME, *arguments[1:])
            if named.get("backend") is not None:
                named["backend"] = NAME
            return function(*arguments, **named)

        return call

    patches = {name: translated(getattr(dist, name)) for name in ("init_process_group", "new_group")}
    with mock.patch.multiple(dist, **patches):
        yield
