"""python -m hpc_rl.rl.main_ppo [--run-dir DIR] --config FILE | key=value ...

Train with reinforcement learning on the Ray cluster in RAY_ADDRESS, as `hpc-rl submit ppo` does, or on a cluster that
is started on this machine. A run that is started again in its run directory resumes from its newest checkpoint. Exit
codes: 0 finished, 75 stopped with a checkpoint, 2 bad input, 1 any other error.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rl.config.compose import compose, load_config
from hpc_rl.config.ppo import PpoConfig
from hpc_rl.errors import RunError, UserError
from hpc_rl.host.disk import tolerate_lost_output
from hpc_rl.host.heartbeat import heart
from hpc_rl.host.imports import large_imports
from hpc_rl.run_dir import RunDir, current_attempt_dir, current_run_dir

if TYPE_CHECKING:
    from hpc_rl.rl.cluster import Runner


class TaskRunner:
    """The driver. It runs in a Ray actor; its output goes to `driver.log` in the attempt's folder."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        """Set up the run, train, and return the exit code."""
        with large_imports():
            from hpc_rl.rl import checkpoints
            from hpc_rl.rl.cluster import driver_log
            from hpc_rl.rl.process import log_to, quiet_libraries
            from hpc_rl.rl.setup import set_up
            from hpc_rl.rl.trainer import train
            from hpc_rl.tracking.report import failure_reported

        log_to(driver_log(logs))
        heart.begin("the driver")
        quiet_libraries()
        with heart.phase("load"):
            state = set_up(config, run, logs)
        try:
            with failure_reported(run), checkpoints.finished(state):
                return train(state)
        finally:
            state.scoring.close()
            try:
                state.rollout.close()
            except RunError as error:  # the training itself succeeded
                print(f"warning: {error}", flush=True)


def run_ppo(config: PpoConfig, task_runner_class: type[Runner] | None = None, run: RunDir | None = None) -> int:
    """Train to the end, or until the run directory has a stop file.

    Args:
        task_runner_class: replaces TaskRunner; a class with the same method `run`.
        run: the run directory. Default: that of the job, or a new one below `runs/`.

    Returns:
        the process's exit code: 0, or 75 if the run stopped early and resumes when it is started again.

    Raises:
        UserError: the run cannot work as requested.
        RunError: a process died or did not answer.
    """
    from hpc_rl.rl.cluster import new_attempt, new_run, run_driver

    run = run or current_run_dir() or new_run()
    logs = current_attempt_dir() or new_attempt(run, config)
    return run_driver(config, task_runner_class or TaskRunner, run, logs)


def parse(arguments: Sequence[str]) -> tuple[PpoConfig, RunDir | None]:
    """Read the command line. Raises UserError if anything in it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.rl.main_ppo", description=__doc__)
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
        config = load_config("ppo", options.config)
    else:
        from hpc_rl.training.distributed import fill_in_device

        config = compose("ppo", options.overrides, fill_in=[fill_in_device])
    assert isinstance(config, PpoConfig)
    return config, RunDir(options.run_dir.absolute()) if options.run_dir else None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. All errors are printed here."""
    try:
        config, run = parse(arguments)
        return run_ppo(config, run=run)
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


if __name__ == "__main__":
    tolerate_lost_output()
    sys.exit(main(sys.argv[1:]))
