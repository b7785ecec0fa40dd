"""Two ranks of gloo, of which one does not join the last collective. Each leaves the record of torch's flight recorder.

    python late_rank.py FOLDER RANK GROUP

Rank 1 waits for the record of rank 0, whose collective times out, and then leaves its own.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from hpc_rl.training.parallel import distributed, flight_recorder

folder, rank, group = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "HPC_RL_GROUP_DIR": group}
flight_recorder.prepare(folder)
distributed._COLLECTIVE_TIMEOUT = timedelta(seconds=4)
world = distributed.start("cpu", start_timeout_s=600)
world.gather_rows([1.0])
world.gather_rows([2.0])
if world.is_main:
    try:
        world.gather_rows([3.0])
    except RuntimeError as error:
        flight_recorder.write(ValueError("another error leaves nothing"))
        assert not list(folder.iterdir())
        flight_recorder.write(error)
else:
    deadline = time.monotonic() + 600
    while not (folder / "flight-rank0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    flight_recorder.write(RuntimeError("[gloo] Connection closed by peer"))
    assert dist.is_initialized()
sys.stdout.flush()
os._exit(0)
