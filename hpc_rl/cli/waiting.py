"""Waiting for the end of a job, which goes on if the user stops waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hpc_rl.cli.app import note
from hpc_rl.run_dir import RunDir

if TYPE_CHECKING:
    from hpc_rl.runs.status import RunStatus

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended: 128 + SIGINT."""


def interrupted(run: RunDir) -> int:
    """Report that a run's job continues although the user has pressed Ctrl-C, and return the exit code."""
    from hpc_rl.runs.status import current_job

    note(f"job {current_job(run)} continues; end it with hpc-rl stop {run.name} or hpc-rl cancel {run.name}")
    return INTERRUPTED


def wait_for(run: RunDir, poll: Callable[[], None], saw: Callable[[RunStatus], None]) -> int:
    """Wait until a run's job has ended, and return its exit code. Ctrl-C ends the waiting only.

    Args:
        saw: receives the status of the run whenever Slurm was asked.
    """
    from hpc_rl.runs import control

    try:
        return control.wait(run, poll, saw)
    except KeyboardInterrupt:
        return interrupted(run)
