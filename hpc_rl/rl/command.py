"""What the programs that run in a driver share: `main_ppo` and `main_generate`."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir, current_attempt_dir, current_run_dir

if TYPE_CHECKING:
    from hpc_rl.rl.actors.cluster import DriverConfig, DriverProgram


def run_in_driver(kind: str, config: DriverConfig, runner_class: type[DriverProgram], run: RunDir | None) -> int:
    """Run a driver in a run directory: the given one, that of the job, or a new one below `runs/`.

    Returns:
        the process's exit code: 0, or 75 if the run stopped early and resumes when it is started again.

    Raises:
        UserError: the run cannot work as requested.
        RunError: a process died or did not answer.
    """
    from hpc_rl.rl.actors.cluster import new_attempt, new_run, run_driver

    run = run or current_run_dir() or new_run(kind)
    if logs := current_attempt_dir():
        return run_driver(config, runner_class, run, logs)
    run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with run.take_lock(f"local-{os.getpid()}"):  # as a job does, so that no other one starts, and no file is removed
        return run_driver(config, runner_class, run, new_attempt(run, config))


def run_main(command: Callable[[], int]) -> int:
    """Run the command of a process and return its exit code. All errors are printed here."""
    try:
        return command()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"hpc-rl: {line}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the outermost handler: print the error and exit
        traceback.print_exc()
        cause = getattr(error, "cause", error)  # Ray wraps the exceptions of actors
        first = str(cause).strip().splitlines()
        print(f"hpc-rl: {type(cause).__name__}{': ' + first[0] if first else ''}", file=sys.stderr)
        return 1
