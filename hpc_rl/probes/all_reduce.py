"""The doctor's test of the network between the nodes: how fast the ranks of a job add up numbers.

    torchrun ... -m hpc_rl.probes.all_reduce

Rank 0 writes result.json into the attempt's folder.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_rl.errors import RunError
from hpc_rl.run_dir import current_attempt_dir

TIMEOUT_S = 60
BYTES = {"cpu": 16 << 20, "gpu": 256 << 20}
REPEATS = 5


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        device = torch.device(device.type, rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)
    check_sum(device, ranks)
    latency_s = seconds_each(torch.ones(1, device=device))
    size = BYTES["cpu" if device.type == "cpu" else "gpu"]
    seconds = seconds_each(torch.ones(size // 4, device=device))
    result = {
        "backend": backend,
        "ranks": ranks,
        "bytes": size,
        "latency_s": latency_s,
        "seconds": seconds,
        # Bus bandwidth per rank as nccl-tests defines it (its PERFORMANCE.md), in 10^9 bytes per second.
        "bandwidth_gb_s": size / seconds * 2 * (ranks - 1) / ranks / 1e9,
    }
    folder = current_attempt_dir()
    if rank == 0 and folder is not None:
        (folder / "result.json").write_text(json.dumps(result) + "\n")
    dist.destroy_process_group()


def check_sum(device: torch.device, ranks: int) -> None:
    """Check the sum of the ranks.

    Raises:
        RunError: the sum is wrong, so the network or a GPU corrupts data.
    """
    numbers = torch.full((1000,), float(dist.get_rank()), device=device)
    dist.all_reduce(numbers)
    if numbers.ne(ranks * (ranks - 1) / 2).any():
        raise RunError(
            f"the sum of 0 to {ranks - 1} is {numbers.unique().tolist()}: the network or a GPU corrupts data"
        )


def seconds_each(tensor: torch.Tensor) -> float:
    """Return the median time of one all-reduce in seconds; the first one is not counted."""
    taken = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(tensor)
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize(tensor.device)
        taken.append(time.monotonic() - began)
    return sorted(taken[1:])[REPEATS // 2]


if __name__ == "__main__":
    main()
