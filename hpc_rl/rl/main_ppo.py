"""python -m hpc_rl.rl.main_ppo [--run-dir DIR] --config FILE | key=value ...

Train with reinforcement learning on the Ray cluster in RAY_ADDRESS, as `hpc-rl submit ppo` does, or on a cluster that
is started on this machine. Without a run directory, a new one is made in runs/. A run that is started again in its run
directory resumes from its newest checkpoint. Exit codes: 0 finished, 75 stopped, 2 bad input, 1 any other error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import EXIT_STOPPED, RunError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.command import run_in_driver, run_main
from hpc_rl.run_dir import RunDir
from hpc_rl.software.allocator import keep_freed_memory
from hpc_rl.software.imports import large_imports
from hpc_rl.system.disk import tolerate_lost_output
from hpc_rl.training.command import parse as read_command

if TYPE_CHECKING:
    from hpc_rl.rl.actors.cluster import DriverProgram


class TaskRunner:
    """The driver. It runs in a Ray actor; its output goes to `driver.log` in the attempt's folder."""

    def run(self, config: PpoConfig, run: RunDir, logs: Path) -> int:
        """Set up the run, train, and return the exit code."""
        with large_imports():
            from hpc_rl.rl.actors.cluster import driver_log
            from hpc_rl.rl.actors.process import begin, quiet_libraries
            from hpc_rl.rl.loop.setup import set_up
            from hpc_rl.rl.loop.trainer import train
            from hpc_rl.tracking.page.report import failure_reported
            from hpc_rl.training.stopping import Stopped

        begin(driver_log(logs))
        heart.begin("the driver")
        quiet_libraries()
        keep_freed_memory()
        try:
            with heart.phase("load"):
                state = set_up(config, run, logs)
        except Stopped as stopped:
            print(stopped, flush=True)
            return EXIT_STOPPED
        try:
            with state.tracker, failure_reported(run), state.saver:
                return train(state)
        finally:
            state.batches.close()
            state.scoring.close()
            state.carrier.close()
            try:
                state.rollout.close()
            except RunError as error:  # the training itself succeeded
                print(f"warning: {error}", flush=True)


def run_ppo(config: PpoConfig, task_runner_class: type[DriverProgram] | None = None, run: RunDir | None = None) -> int:
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
    return run_in_driver("ppo", config, task_runner_class or TaskRunner, run)


def parse(arguments: Sequence[str]) -> tuple[PpoConfig, RunDir | None]:
    """Read the command line. Raises UserError if anything in it is wrong."""
    _, config, run = read_command("hpc_rl.rl.main_ppo", __doc__, arguments)
    assert isinstance(config, PpoConfig)
    return config, run


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. All errors are printed here."""

    def command() -> int:
        config, run = parse(arguments)
        return run_ppo(config, run=run)

    return run_main(command)


if __name__ == "__main__":
    tolerate_lost_output()
    sys.exit(main(sys.argv[1:]))
