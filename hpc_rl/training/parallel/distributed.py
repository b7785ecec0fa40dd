"""The process group: this process's rank, the number of ranks, and small exchanges between them.

    world = distributed.start("cpu", start_timeout_s=300)

It works under torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE) and in a single plain process. The ranks meet
in a private folder (`hpc_rl.training.parallel.rendezvous`). What they exchange is tensors and JSON: a pickle from the
network could run any program.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpc_rl.errors import AgreedError, AgreedRunError, RunError, UserError
from hpc_rl.formats.counted import counted
from hpc_rl.run_dir import ENV_GROUP_DIR
from hpc_rl.system.accelerators import DEVICES, extension_of
from hpc_rl.training.parallel import plain_pickles, rendezvous

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others in one collective, during which rank 0 may load or export a large model. If a
rank dies, the job ends sooner, because the launcher sees its exit."""

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of the job, or some of them, from the view of one of these."""

    rank: int
    size: int
    device: torch.device
    ranks_per_node: int | None = None
    """Number of ranks on each node, which are consecutive; None if it differs between nodes."""
    group: dist.ProcessGroup | None = None
    """Process group of these ranks. None: the default group, which has all ranks of the job."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints messages."""
        return self.rank == 0

    def in_job(self, rank: int) -> int:
        """Return the number in the whole job of one of these ranks."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def new_group(self, ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
        """Return a new process group of some of these ranks. Only they call this.

        If these are not all ranks of the job, each of them must have the same number of groups before: torch makes a
        name for the group from this number.

        Args:
            options: those of torch.distributed.new_group. A group has the time limit of the process group by default;
                torch's default is 10 minutes for NCCL.
        """
        options = {"timeout": _COLLECTIVE_TIMEOUT, **options}
        if self.group is None and len(ranks) == self.size:
            return dist.new_group(**options)
        members = [self.in_job(rank) for rank in ranks]
        return dist.new_group(members, use_local_synchronization=True, **options)

    def part(self, ranks: Sequence[int], ranks_per_node: int, **options: Any) -> World:
        """Return some of these ranks, numbered from 0 in ascending order, as a world of their own. Only they call this.

        Args:
            ranks_per_node: how many of them are on each node.
            options: those of torch.distributed.new_group.
        """
        group, rank = self.new_group(ranks, **options), sorted(ranks).index(self.rank)
        return replace(self, rank=rank, size=len(ranks), ranks_per_node=ranks_per_node, group=group)

    @property
    def on_accelerator(self) -> bool:
        """Whether this rank computes on a GPU or a similar device."""
        return self.device.type != "cpu"

    def gather_rows(self, values: Sequence[float]) -> torch.Tensor:
        """Return every rank's numbers in one collective: float64 on the CPU, shape [ranks, len(values)]."""
        row = torch.tensor([list(values)], dtype=torch.float64)
        if self.size == 1:
            return row
        return torch.cat(self._all_gather(row))

    def gather_varied(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's one-dimensional CPU tensor; the lengths may differ, the dtype may not."""
        if self.size == 1:
            return [values]
        lengths = [int(length) for length in self.gather_rows([len(values)])[:, 0]]
        padded = values.new_zeros(max(lengths))
        padded[: len(values)] = values
        rows = self._all_gather(padded)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank as JSON returns it: tuples become lists.

        Raises:
            TypeError: rank 0's value cannot be written as JSON.
        """
        text = _as_bytes(value if self.is_main else None)
        if self.size > 1:
            length = torch.tensor([len(text)])
            dist.broadcast(length, group_src=0, group=self.group)
            text = text if self.is_main else text.new_empty(int(length))
            dist.broadcast(text, group_src=0, group=self.group)
        return _from_bytes(text)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks as JSON returns them, in the order of the ranks.

        Raises:
            TypeError: this rank's value cannot be written as JSON.
        """
        return [_from_bytes(text) for text in self.gather_varied(_as_bytes(value))]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on some rank. Every rank calls this."""
        return bool(self.gather_rows([float(flag)]).any())

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            self.gather_rows([0.0])

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank, and fail on every rank if it fails on one.

        Raises:
            AgreedError: `work` raised UserError on some rank; AgreedRunError if it was a RunError. The message names
                the rank unless all ranks agree.
        """
        result, failure = None, None
        try:
            result = work()
        except UserError as error:
            failure = (str(error), isinstance(error, RunError))
        failed = {rank: tuple(found) for rank, found in enumerate(self.gather(failure)) if found is not None}
        if not failed:
            return result  # type: ignore[return-value]
        first = min(failed)
        text, while_running = failed[first]
        alike = len(failed) == self.size and len(set(failed.values())) == 1
        raise (AgreedRunError if while_running else AgreedError)(
            text if alike else f"rank {self.in_job(first)}: {text}"
        )

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.group)
        return parts


ONE_PROCESS = World(rank=0, size=1, device=torch.device("cpu"))
"""The world of a single process."""


def _as_bytes(value: Any) -> torch.Tensor:
    """Return a value as JSON: uint8 [bytes]."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(text: torch.Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


def rank_from_env() -> int:
    """Return this process's rank before the process group exists; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def start(device: str, start_timeout_s: int) -> World:
    """Join the process group.

    Args:
        device: torch's name: cuda, npu, xpu (the backend that torch uses for it, and gloo for tensors in host memory)
            or cpu (gloo).
        start_timeout_s: seconds within which all ranks must arrive.

    Raises:
        UserError: the device does not exist, or a rank did not arrive in time.
    """
    store, rank, size = meet(start_timeout_s)
    here = choose_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    backend = "gloo" if here.type == "cpu" else f"cpu:gloo,{here.type}:{dist.get_default_backend_for_device(here)}"
    if size > 1 or here.type != "cpu":  # FSDP's mixed precision needs a group even for one GPU
        join(backend, store, rank, size, _COLLECTIVE_TIMEOUT)
    world = World(rank=rank, size=size, device=here)
    on_node = world.gather_rows([float(os.environ.get("LOCAL_WORLD_SIZE", size))])[:, 0].unique().tolist()
    return replace(world, ranks_per_node=int(on_node[0]) if len(on_node) == 1 else None)


def join(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Start the process group with what `meet` returns.

    Args:
        timeout: how long a rank waits for the others in a collective, and for what they put into the store. A rank
            connects NCCL in its first collective with a key that rank 0 puts there, and a store that
            torch.distributed.init_process_group is given would keep its own limit: 5 minutes.
    """
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def finish() -> None:
    """Leave the group after success. After an error, end the process instead: this waits for the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def fill_in_device(tree: Mapping[str, Any]) -> dict[str, str]:
    """Settle trainer.device=auto for a trainer that is started by hand: GPUs if this process sees any, else CPUs.

    Args:
        tree: the configuration as nested tables, as `hpc_rl.config.compose` passes it to its `fill_in`.
    """
    trainer = tree.get("trainer")
    if not isinstance(trainer, Mapping) or trainer.get("device", "auto") != "auto":
        return {}
    there = torch.accelerator.current_accelerator(check_available=True)
    return {"trainer.device": there.type if there is not None and there.type in DEVICES else "cpu"}


def choose_device(kind: str, local_rank: int) -> torch.device:
    """Return the device of this process, and make it torch's current one.

    Args:
        kind: cuda, npu, xpu or cpu.
        local_rank: its index among the devices that the process sees.

    Raises:
        UserError: there is no such device.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if extension := extension_of(kind):
        try:
            importlib.import_module(extension)
        except ImportError as error:
            raise UserError(f"trainer.device={kind} needs the package {extension}: {error}") from error
    there = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if there is not None and there.type == kind else 0
    if count <= local_rank:
        raise UserError(
            f"trainer.device is {kind} and this process needs GPU {local_rank}, but it sees {counted(count, 'GPU')} on "
            f"{socket.gethostname()}: lower trainer.n_gpus_per_node, or set trainer.device=cpu"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def meet(timeout_s: float) -> tuple[dist.Store, int, int]:
    """Return (store for a process group, rank, number of ranks) after all ranks have arrived.

    From now on, torch unpickles only plain data of other ranks.

    Raises:
        UserError: a rank did not arrive in time, or the folder in which they meet cannot be used.
    """
    plain_pickles.require()
    rank, size = rank_from_env(), int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        return dist.HashStore(), 0, 1
    if ENV_GROUP_DIR not in os.environ:
        raise UserError(
            f"{size} ranks need a private folder in which they meet, and {ENV_GROUP_DIR} is not set: start them with "
            f"hpc-rl submit --local, or set {ENV_GROUP_DIR} to a new, empty folder that all of them see "
            f"({ENV_GROUP_DIR}=$(mktemp -d) torchrun --nproc-per-node {size})"
        )
    return rendezvous.meet(Path(os.environ[ENV_GROUP_DIR]), rank, size, timeout_s), rank, size
