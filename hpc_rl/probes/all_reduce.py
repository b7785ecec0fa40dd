"""The doctor's test of the network between the nodes: how fast the ranks of a job add up numbers.

    torchrun ... -m hpc_rl.probes.all_reduce

Rank 0 writes result.json into the attempt's folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_rl.errors import RunError
from hpc_rl.run_dir import current_attempt_dir
from hpc_rl.training.parallel import distributed

TIMEOUT_S = 60
BYTES = {"cpu": 16 << 20, "gpu": 256 << 20}
REPEATS = 5


@dataclass(frozen=True)
class AllReduceSpeed:
    """The speed of an all-reduce."""

    backend: str
    ranks: int
    bytes: int
    latency_s: float
    seconds: float
    bandwidth_gb_s: float
    """Bus bandwidth per rank as nccl-tests defines it (its PERFORMANCE.md), in 10^9 bytes per second."""


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backend = dist.get_default_backend_for_device(device)
    store, rank, ranks = distributed.meet(TIMEOUT_S)
    distributed.join(backend, store, rank, ranks, timedelta(seconds=TIMEOUT_S))
    if device.type != "cpu":
        device = torch.device(device.type, rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)
    result = measure(device, None, range(ranks))
    folder = current_attempt_dir()
    if rank == 0 and folder is not None:
        (folder / "result.json").write_text(json.dumps(asdict(result)) + "\n")
    dist.destroy_process_group()


def measure(device: torch.device, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> AllReduceSpeed:
    """Check and time the all-reduce of a group; all of its ranks call this.

    Args:
        group: None for all ranks.
        ranks: the ranks of the group.

    Raises:
        RunError: the sum is wrong, so the network or a GPU corrupts data.
    """
    check_sum(device, group, ranks)
    latency_s = seconds_each(torch.ones(1, device=device), group)
    backend = dist.get_default_backend_for_device(device)
    size = BYTES["cpu" if device.type == "cpu" else "gpu"]
    seconds = seconds_each(torch.ones(size // 4, device=device), group)
    bandwidth = size / seconds * 2 * (len(ranks) - 1) / len(ranks) / 1e9
    return AllReduceSpeed(backend, len(ranks), size, latency_s, seconds, bandwidth)


def check_sum(device: torch.device, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
    """Check the sum of the numbers of the ranks.

    Raises:
        RunError: the sum is wrong, so the network or a GPU corrupts data.
    """
    numbers = torch.full((1000,), float(dist.get_rank()), device=device)
    dist.all_reduce(numbers, group=group)
    if numbers.ne(sum(ranks)).any():
        raise RunError(
            f"the sum of the ranks {', '.join(map(str, ranks))} is {numbers.unique().tolist()}: the network or a GPU "
            "corrupts data"
        )


def seconds_each(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    """Return the median time of one all-reduce in seconds; the first one is not counted."""
    taken = []
    for _ in range(REPEATS + 1):
        dist.barrier(group=group)
        began = time.monotonic()
        dist.all_reduce(tensor, group=group)
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize(tensor.device)
        taken.append(time.monotonic() - began)
    return sorted(taken[1:])[REPEATS // 2]


if __name__ == "__main__":
    main()
