"""Three ranks that wait as on GPUs: they start a collective and wait for it elsewhere. Rank 1 does not start it.

python gpu_waits.py RANK GROUP ATTEMPT    # ATTEMPT: the attempt's folder for the records; empty: no records
"""

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from hpc_rl.liveness.heartbeat import heart
from hpc_rl.training.parallel import distributed, flight_recorder


def read_a_value(work: dist.Work) -> None:
    """Wait for the GPU, as `.item()` does: no frame of torch.distributed is on the stack."""
    while not work.is_completed():
        time.sleep(0.05)


def read_a_file() -> NoReturn:
    while True:
        time.sleep(0.05)


def main(rank: str, group: str, attempt: str) -> None:
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "3", "HPC_RL_GROUP_DIR": group}
    flight_recorder.prepare(Path(attempt))
    ready = Path(group).with_name(f"ready-{rank}")
    world = distributed.start("cpu", start_timeout_s=600)
    world.barrier()
    heart.begin(f"rank {rank}")
    with heart.phase("forward_backward"):
        pass
    with heart.phase("forward_backward"):
        if rank == "1":
            ready.touch()
            read_a_file()
        work = dist.all_reduce(torch.ones(8), async_op=True)
        ready.touch()
        read_a_value(work)


main(*sys.argv[1:])
