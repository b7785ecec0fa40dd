"""Starting a run again where it left off: in the job that it has, or in a new one with the same script."""

from __future__ import annotations

from hpc_rl.errors import UserError
from hpc_rl.launch import jobs, runs
from hpc_rl.launch.after import find_after_again
from hpc_rl.run_dir import RunDir

REQUEUE = "requeue"
"""The stop file's text with which the job script queues its job again after saving."""


def requeue(run: RunDir) -> str:
    """Queue the run again; what was done, in a line.

    A running job saves first. One that has ended is submitted again as it was, with the script that is in the run
    directory, and goes on from its last checkpoint.

    Raises:
        UserError: its job cannot be queued again, or has nothing left to do.
    """
    now = runs.status(run)
    if now.state == "COMPLETED":
        return f"run {run.name} has nothing to queue again: it is {now.state}"
    if now.state == "PENDING":
        return f"job {now.job_id} of run {run.name} is waiting in the queue already"
    if not run.script.is_file():
        raise UserError(f"run {run.name} has no {run.script.name}: submit it again by its name")
    if now.active:
        return _from_within(run, now)
    if now.job_id is not None and not runs.in_slurm(run):
        raise UserError(f"run {run.name} was no job of Slurm's queue: start it again by its name, as the last time")
    after = find_after_again([run])
    run.stop.unlink(missing_ok=True)
    job_id = jobs.queue(run.script.read_text(), after.sbatch_options if after else [])
    jobs.record_again(run, job_id)
    waits = f" after job {', '.join(after.job_ids)}" if after and after.job_ids else ""
    return f"submitted job {job_id}{waits}: run {run.name} goes on, {now.state} before"


def _from_within(run: RunDir, now: runs.RunStatus) -> str:
    if not runs.in_slurm(run):
        raise UserError(f"run {run.name} is no job of Slurm's queue: stop it, and start it again by its name")
    if "scontrol requeue" not in run.script.read_text():
        raise UserError(
            f"job {now.job_id} of run {run.name} was submitted with slurm.requeue=false: "
            f"hpc-rl stop {run.name}, and then requeue"
        )
    jobs.ask_to_stop(run, REQUEUE)
    return f"job {now.job_id} of run {run.name} will save at its next step and be queued again"
