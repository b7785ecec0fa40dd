"""One rank of a torchrun job: writes its own log and records its exit code.

    python -m hpc_rl.node.rank -- -m hpc_rl.finetune.train ...

torchrun starts this instead of the program, because torchrun exits with code 1 whatever the exit codes of its ranks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_rl.errors import EXIT_BAD_INPUT, EXIT_STOPPED
from hpc_rl.node.rank_ends import RankExit, log_path, read_exits, record_exit, record_start
from hpc_rl.node.signals import ASKED_GRACE_S
from hpc_rl.run_dir import ENV_ATTEMPT_DIR
from hpc_rl.system.disk import tolerate_lost_output
from hpc_rl.system.files import open_to_append
from hpc_rl.system.numa import bind_near, gpu_of_rank
from hpc_rl.system.processes import deferred_termination, die_with_parent, forward_termination, shell_code, start, wait

ENV_NODE_RANK, ENV_NODES = "HPC_RL_NODE_RANK", "HPC_RL_NODES"
"""Variables with this node's place in the job, and the number of its nodes. Every node has equally many ranks."""
ENV_OF_FIRST = "HPC_RL_OF_RANK_0"
"""Variable with the names of variables that only rank 0 gets."""
SAVE_TIMEOUT_S = 1800
"""How long a stopped rank waits for ranks that are still saving. The walltime usually ends it sooner."""
MESSAGE_TIMEOUT_S = 60
"""How long a rank that ends because of bad input waits for rank 0, which prints the message."""


def main(argv: list[str]) -> int:
    die_with_parent()
    program = argv[argv.index("--") + 1 :]
    attempt_dir = Path(os.environ[ENV_ATTEMPT_DIR])
    os.environ.update(place_in_job(os.environ))
    if os.environ["RANK"] != "0":
        for name in os.environ.get(ENV_OF_FIRST, "").split():
            os.environ.pop(name, None)
    rank, node_rank = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
    bind_near(os.environ, gpu_of_rank(os.environ, int(os.environ["LOCAL_RANK"])))
    # Another rank may fail immediately. torchrun then ends this process, which would leave a start without an end.
    with open_to_append(log_path(attempt_dir, node_rank, rank)) as log, deferred_termination():
        record_start(attempt_dir, node_rank, rank)
        child = start([sys.executable, "-u", *program], os.environ, log)
        asked_to_end = forward_termination(child, ASKED_GRACE_S / 2)
    code = shell_code(wait(child))
    ended = RankExit(rank, node_rank, code, asked_to_end.is_set(), time.monotonic())
    try:
        record_exit(attempt_dir, ended)
    except OSError as error:
        print(f"hpc-rl: the end of rank {rank} (exit code {code}) cannot be recorded: {error}", file=sys.stderr)
    # torchrun treats both codes as failures and would end the other ranks, which may still be saving, or rank 0, which
    # prints a mistake that all ranks have found.
    if ended.exit_code == EXIT_STOPPED:
        _await_exits(attempt_dir, set(range(int(os.environ["WORLD_SIZE"]))), SAVE_TIMEOUT_S, asked_to_end)
    elif ended.exit_code == EXIT_BAD_INPUT:
        _await_exits(attempt_dir, {0}, MESSAGE_TIMEOUT_S, asked_to_end)
    return ended.exit_code


def place_in_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for the ranks of all nodes. Each node's torchrun counts only its own."""
    node, nodes = int(environ[ENV_NODE_RANK]), int(environ[ENV_NODES])
    local, on_node = int(environ["LOCAL_RANK"]), int(environ["LOCAL_WORLD_SIZE"])
    rank, size = str(node * on_node + local), str(nodes * on_node)
    return {
        **{"RANK": rank, "ROLE_RANK": rank, "WORLD_SIZE": size, "ROLE_WORLD_SIZE": size},
        **{"GROUP_RANK": str(node), "GROUP_WORLD_SIZE": str(nodes)},
    }


def _await_exits(attempt_dir: Path, ranks: set[int], timeout_s: float, asked_to_end: threading.Event) -> None:
    """Wait until these ranks have ended, or this one is asked to end."""
    deadline = time.monotonic() + timeout_s
    while not ranks <= {ended.rank for ended in read_exits(attempt_dir)} and time.monotonic() < deadline:
        if asked_to_end.wait(0.2):
            return


if __name__ == "__main__":
    tolerate_lost_output()
    sys.exit(main(sys.argv[1:]))
