"""The weight transfers: the ways in which engines in separate processes receive the policy's weights.

To add a transfer, write a module with a function `open_sender` (see `Opener`), add a row to `WEIGHT_TRANSFERS`, and
name it in the row of each engine that supports it (`hpc_rl.config.rl.engines.ENGINES`). docs/extending.md has an
example.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpc_rl.rl.weights.base import EngineActors, WeightSender, WeightSource
from hpc_rl.training.parallel.distributed import World


@dataclass(frozen=True)
class TransferSpec:
    """Describe a weight transfer."""

    module: str
    """Module whose function `open_sender` returns the sender."""
    fits: Callable[[str, bool], bool]
    """Whether the transfer works, given torch's name of the device, and whether engines share the policy's GPUs."""


WEIGHT_TRANSFERS: dict[str, TransferSpec] = {
    "host": TransferSpec("hpc_rl.rl.weights.host", lambda device, shared: True),
    "ipc": TransferSpec("hpc_rl.rl.weights.vllm_ipc", lambda device, shared: device == "cuda" and shared),
    "nccl": TransferSpec("hpc_rl.rl.weights.vllm_nccl", lambda device, shared: device == "cuda" and not shared),
}


class Opener(Protocol):
    """The function `open_sender` of a transfer's module."""

    def __call__(self, source: WeightSource, engines: EngineActors, world: World, bucket_bytes: int) -> WeightSender:
        """Connect to the engines, which have started. Every training rank calls this at the same time.

        Args:
            source: the policy's weights.
            engines: all engines.
            world: the training ranks.
            bucket_bytes: most bytes in transit at a time. A single tensor that is larger is sent nevertheless.
        """
        ...


def choose_transfer(supported: Sequence[str], device: str, shared: bool) -> str:
    """Return the first supported transfer that fits.

    Args:
        supported: names of transfers, best first.
        device: torch's name of the device, such as cuda or cpu.
        shared: whether engines share the GPUs of the policy's workers.
    """
    return next(name for name in supported if WEIGHT_TRANSFERS[name].fits(device, shared))


def open_sender(
    name: str, source: WeightSource, engines: EngineActors, world: World, bucket_bytes: int
) -> WeightSender:
    """Connect a training rank to the engines by the transfer of this name; see `Opener`."""
    opener: Opener = importlib.import_module(WEIGHT_TRANSFERS[name].module).open_sender
    return opener(source, engines, world, bucket_bytes)
