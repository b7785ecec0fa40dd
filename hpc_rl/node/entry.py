"""What every node entry starts with: its allocation, its attempt's folder, and errors as lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.host.environment import nccl_defaults, openmp_defaults, tokenizer_defaults
from hpc_rl.run_dir import ENV_ATTEMPT_DIR
from hpc_rl.slurm.allocation import Allocation, read_allocation


def run_entry(entry: Callable[[], int]) -> int:
    """Exit code of the entry; a mistake of the user's is a line."""
    try:
        return entry()
    except UserError as error:
        say(str(error))
        return error.exit_code


def this_allocation() -> Allocation:
    """Raises UserError where SLURM_* are missing or malformed."""
    try:
        return read_allocation(os.environ, len(os.sched_getaffinity(0)))
    except ValueError as error:
        raise UserError(str(error)) from error


def this_attempt_dir() -> Path:
    if ENV_ATTEMPT_DIR not in os.environ:
        raise UserError(
            f"{ENV_ATTEMPT_DIR} is not set: start this by a script that hpc-rl rendered, or by hpc-rl submit --local"
        )
    return Path(os.environ[ENV_ATTEMPT_DIR])


def worker_defaults(interface: str, threads: int) -> dict[str, str]:
    """Environment that training processes want where the user exported nothing else.

    Args:
        interface: between the nodes.
        threads: of OpenMP, for each process.
    """
    return {
        "GLOO_SOCKET_IFNAME": interface,
        **nccl_defaults(interface),
        **openmp_defaults(threads),
        **tokenizer_defaults(),
    }


def say(text: str) -> None:
    print(f"hpc-rl: {text}", file=sys.stderr, flush=True)
