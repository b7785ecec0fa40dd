"""Wait for the job of a run, stop it, or cancel it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.host.files import read_json, write_atomically
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import RunStatus, in_slurm, process_alive, status_of
from hpc_rl.slurm import commands

STATE_POLL_S = (1.0, 15.0)
"""First and last interval between two questions to Slurm: many users share its controller."""


def wait(run: RunDir, on_poll: Callable[[], None] = lambda: None) -> int:
    """Block until the run's job has ended; its exit code. `on_poll` is called several times a second.

    A job that is queued again after its walltime's warning has not ended.
    """
    interval, most = STATE_POLL_S
    next_look, seen = 0.0, None
    while True:
        on_poll()
        written = run.status.stat().st_mtime_ns if run.status.exists() else None
        if time.monotonic() >= next_look or written != seen:  # the job wrote where it is: worth a question at once
            now = status_of(run)
            if not now.active:
                on_poll()
                return exit_code(now)
            interval, next_look, seen = min(interval * 1.3, most), time.monotonic() + interval, written
        time.sleep(0.2)


def exit_code(ended: RunStatus) -> int:
    """The exit code that stands for a run's end: never 0 unless it was completed."""
    if ended.state == "COMPLETED":
        return ended.exit_code or 0
    return ended.exit_code or 1


def cancel(run: RunDir) -> str:
    """End the run's job now; what was done, in a line."""
    now = status_of(run)
    if not now.active or now.job_id is None:
        return f"run {run.name} has no job to cancel: it is {now.state}"
    if not in_slurm(run):
        _end_process(run)
    else:
        commands.cancel(now.job_id)
        note_cancelled(now)
    saved = newest_checkpoint(run)
    left = f"submit it again to resume from {saved}" if saved else "it had saved no checkpoint yet"
    return f"cancelled job {now.job_id} of run {run.name}; {left}"


def newest_checkpoint(run: RunDir) -> str | None:
    """Name of the newest complete checkpoint, such as step-00000040."""
    return max((path.name for path in run.checkpoints.glob("step-*") if not path.suffix), default=None)


def stop(run: RunDir) -> str:
    """Ask the run to save at the next step and leave; what was done, in a line."""
    now = status_of(run)
    if not now.active or now.job_id is None:
        return f"run {run.name} has nothing to stop: it is {now.state}"
    if now.state == "PENDING":
        commands.cancel(now.job_id)
        note_cancelled(now)
        return f"job {now.job_id} of run {run.name} was waiting; took it out of the queue"
    ask_to_stop(run)
    return f"run {run.name} will save at its next step and leave with exit code {EXIT_STOPPED}"


def ask_to_stop(run: RunDir, reason: str = "user") -> None:
    """Write the stop file. Where its reason is "requeue", the job script queues the job again."""
    write_atomically(run.stop, f"{reason}\n")


def note_cancelled(pending: RunStatus) -> None:
    """Keep in the run directory that a job which was waiting is cancelled: Slurm forgets it within minutes, and a task
    of an array at once.
    """
    if pending.state == "PENDING":
        facts = {"job_id": pending.job_id, "attempt": 0, "state": "CANCELLED", "exit_code": None}
        write_atomically(RunDir(Path(pending.run_dir)).status, json.dumps(facts) + "\n")


def _end_process(run: RunDir) -> None:
    job = read_json(run.job)
    if job["host"] != os.uname().nodename:
        raise UserError(f"run {run.name} is a process on {job['host']}: cancel it there")
    pid = int(job["pid"])
    if process_alive(pid, int(job["start_time"])):
        os.kill(pid, signal.SIGTERM)
