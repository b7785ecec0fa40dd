"""Fine-tune a model: one rank of a job.

    python -m hpc_rl.finetune.train [--kind KIND] [--run-dir DIR] --config FILE | key=value ...

torchrun starts this process once per GPU; it also runs alone. The run directory is the run: started again in the same
directory, training resumes from the newest checkpoint. Exit codes: 0 finished, 75 stopped (it can be resumed), 2
bad input, 1 any other error.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.errors import AgreedError, UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.run_dir import RunDir, current_attempt_dir, current_run_dir
from hpc_rl.software.imports import large_imports
from hpc_rl.system.disk import tolerate_lost_output
from hpc_rl.training.command import parse as read_command


def main(arguments: Sequence[str]) -> NoReturn:
    """Run, and exit with the exit code.

    After an error the process exits at once, without the interpreter's clean-up, which could wait for ranks that wait
    for this one.
    """
    rank = int(os.environ.get("RANK", 0))
    who = f"rank {rank}: " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    heart.begin(f"rank {rank}")
    try:
        code = run(arguments)
    except UserError as error:
        if not isinstance(error, AgreedError):
            print(f"{who}{error}", file=sys.stderr)
        elif rank == 0:
            print(error, file=sys.stderr)
        leave(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the last handler: it names the rank that failed, then exits
        traceback.print_exc()
        first = str(error).strip().splitlines()
        print(f"{who}{type(error).__name__}{': ' + first[0] if first else ''}", file=sys.stderr)
        leave(1)
    leave(code)


def run(arguments: Sequence[str]) -> int:
    """Train with these arguments and return the exit code.

    Raises:
        UserError: the arguments, the data or the model are not valid, or training had to stop.
    """
    try:
        config, run_dir = parse(arguments)
    except UserError as error:
        raise AgreedError(str(error)) from error
    with large_imports():
        from transformers.utils import logging

        from hpc_rl.finetune.trainer import train
        from hpc_rl.training import memory_snapshot
        from hpc_rl.training.parallel import distributed, flight_recorder

    attempt, rank = current_attempt_dir(), distributed.rank_from_env()
    logging.disable_progress_bar()  # its control characters would fill log files
    flight_recorder.prepare(attempt)
    world = distributed.start(config.trainer.device, config.slurm.start_timeout_s)
    memory_snapshot.record(world.device, attempt and attempt / f"memory-rank{rank}.pickle")
    try:
        code = train(config, run_dir, world)
    except RuntimeError as error:
        flight_recorder.write(error)
        raise
    distributed.finish()
    return code


def parse(arguments: Sequence[str]) -> tuple[FinetuneConfig, RunDir]:
    """Return the configuration and the run directory.

    Raises:
        UserError: one of them is not valid; every rank raises the same error.
    """
    _, config, given = read_command("hpc_rl.finetune.train", __doc__, arguments)
    run_dir = given or current_run_dir()
    if run_dir is None:
        raise UserError("no run directory: add --run-dir DIR, or set HPC_RL_RUN_DIR")
    assert isinstance(config, FinetuneConfig)
    return config, run_dir


def leave(code: int) -> NoReturn:
    """Exit at once, with all output written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    tolerate_lost_output()
    main(sys.argv[1:])
