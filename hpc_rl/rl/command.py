"""The command line of the programs that run in a driver: `main_ppo` and `main_generate`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rl.config.compose import compose, load_config
from hpc_rl.config.kinds import KINDS
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir, current_attempt_dir, current_run_dir

if TYPE_CHECKING:
    from hpc_rl.rl.cluster import DriverConfig, Runner


def parse(module: str, about: str | None, arguments: Sequence[str]) -> tuple[str, DriverConfig, RunDir | None]:
    """Read the command line of a module that kinds of jobs name as their trainer.

    Returns:
        the kind, its configuration, and the run directory if one is given.

    Raises:
        UserError: anything in it is wrong.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    kinds = [row.name for row in KINDS.values() if row.trainer == module]
    parser.add_argument("--kind", choices=kinds, default=kinds[0], help="the kind of the job")
    parser.add_argument("--config", type=Path, help="resolved configuration (config.yaml of a run directory)")
    parser.add_argument("--run-dir", type=Path, help="run directory (default: $HPC_RL_RUN_DIR, or a new one in runs/)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    if options.config and options.overrides:
        raise UserError(
            f"--config {options.config} is a complete configuration and cannot be combined with key=value: edit the "
            "file, or give key=value without --config"
        )
    if options.config:
        config = load_config(options.kind, options.config)
    else:
        from hpc_rl.training.distributed import fill_in_device

        config = compose(options.kind, options.overrides, fill_in=[fill_in_device])
    return options.kind, config, RunDir(options.run_dir.absolute()) if options.run_dir else None  # type: ignore[return-value]


def run_in_driver(kind: str, config: DriverConfig, runner_class: type[Runner], run: RunDir | None) -> int:
    """Run a driver in a run directory: the given one, that of the job, or a new one below `runs/`.

    Returns:
        the process's exit code: 0, or 75 if the run stopped early and resumes when it is started again.

    Raises:
        UserError: the run cannot work as requested.
        RunError: a process died or did not answer.
    """
    from hpc_rl.rl.cluster import new_attempt, new_run, run_driver

    run = run or current_run_dir() or new_run(kind)
    logs = current_attempt_dir() or new_attempt(run, config)
    return run_driver(config, runner_class, run, logs)


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
