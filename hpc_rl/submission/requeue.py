"""Start a run, or what is left of a sweep, again from its last checkpoint."""

from __future__ import annotations

import re

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs import control
from hpc_rl.runs.status import RunStatus, in_slurm, status_of, statuses_of
from hpc_rl.runs.sweeps import SweepDir, run_of, states
from hpc_rl.submission import queue
from hpc_rl.submission.after import find_after_again

REQUEUE = "requeue"
"""The stop file's text with which the job script queues its job again after saving."""


def requeue(run: RunDir) -> str:
    """Queue the run again; what was done, in a line.

    A running job saves first. One that has ended is submitted again as it was, with the script that is in the run
    directory, and goes on from its last checkpoint.

    Raises:
        UserError: its job cannot be queued again, or has nothing left to do.
    """
    now = status_of(run)
    if now.state == "COMPLETED":
        return f"run {run.name} has nothing to queue again: it is {now.state}"
    if now.state == "PENDING":
        return f"job {now.job_id} of run {run.name} is waiting in the queue already"
    if not run.script.is_file():
        raise UserError(f"run {run.name} has no {run.script.name}: submit it again by its name")
    if now.active:
        return _from_within(run, now)
    if now.job_id is not None and not in_slurm(run):
        raise UserError(f"run {run.name} was no job of Slurm's queue: start it again by its name, as the last time")
    after = find_after_again([run])
    run.stop.unlink(missing_ok=True)
    job_id = queue.queue(run.script.read_text(), after.sbatch_options if after else [])
    queue.record_again(run, job_id)
    waits = f" after job {', '.join(after.job_ids)}" if after and after.job_ids else ""
    return f"submitted job {job_id}{waits}: run {run.name} goes on, {now.state} before"


def _from_within(run: RunDir, now: RunStatus) -> str:
    if not in_slurm(run):
        raise UserError(f"run {run.name} is no job of Slurm's queue: stop it, and start it again by its name")
    if "scontrol requeue" not in run.script.read_text():
        raise UserError(
            f"job {now.job_id} of run {run.name} was submitted with slurm.requeue=false: "
            f"hpc-rl stop {run.name}, and then requeue"
        )
    control.ask_to_stop(run, REQUEUE)
    return f"job {now.job_id} of run {run.name} will save at its next step and be queued again"


def requeue_sweep(sweep: SweepDir) -> str:
    """Queue again, as one array, the runs that ended before they were done; what was done, in a line."""
    found = statuses_of(sweep.runs())
    again = {
        number: now
        for number, now in enumerate(found, 1)
        if not now.active and now.state != "COMPLETED" and run_of(now).script.is_file()
    }
    if not again:
        return f"sweep {sweep.name} has nothing to queue again: {states(found)}"
    if not sweep.script.is_file():
        raise UserError(f"sweep {sweep.name} has no {sweep.script.name}: queue its runs one by one")
    script = sweep.script.read_text()
    limit = re.search(r"^#SBATCH --array=\S*?(%\d+)$", script, re.MULTILINE)
    after = find_after_again(sweep.runs())
    for now in again.values():
        run_of(now).stop.unlink(missing_ok=True)
    array = f"--array={','.join(map(str, again))}{limit[1] if limit else ''}"
    job_id = queue.queue(script, [array, *(after.sbatch_options if after else [])])
    for number, now in again.items():
        queue.record_again(run_of(now), f"{job_id}_{number}")
    before = states(again.values())
    return f"submitted job {job_id}: {len(again)} of {len(found)} runs of sweep {sweep.name} again ({before} before)"
