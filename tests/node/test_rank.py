import os
import subprocess
import sys
from pathlib import Path

from hpc_rl.node.rank_ends import read_exits

ENDED_AT_ITS_START = """
import os, signal, sys
from hpc_rl.node import rank

start = rank.start

def start_and_be_ended(*arguments):
    child = start(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    return child

rank.start = start_and_be_ended
sys.exit(rank.main(["--", "-c", "import time; time.sleep(600)"]))
"""


def test_a_rank_that_is_ended_at_its_start_is_recorded(tmp_path: Path) -> None:
    """Otherwise its parent would seem to be killed, which would hide why torchrun ends it."""
    place = {"HPC_RL_NODE_RANK": "0", "HPC_RL_NODES": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    environ = {**os.environ, **place, "HPC_RL_ATTEMPT_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ENDED_AT_ITS_START], env=environ, timeout=600, check=False)
    (ended,) = read_exits(tmp_path, 0)
    assert (ended.rank, ended.exit_code, ended.was_asked, done.returncode) == (1, 143, True, 143)
