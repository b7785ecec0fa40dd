"""The path of every submission: plan, check, render, reserve, queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hpc_rl.config.kinds import KINDS
from hpc_rl.submission import queue
from hpc_rl.submission.job import Job
from hpc_rl.submission.preflight.checks import check
from hpc_rl.submission.request import Request, plan, reserve
from hpc_rl.submission.script import render

Note = Callable[[str], None]
"""Is told what was chosen for the user, and what could not be checked."""

TEST_STEPS = 2
TEST_TIME = "10:00"
TEST_WARNING_S = 60


def prepare(request: Request, note: Note) -> tuple[Job, str]:
    """The job of a request and its script, after every check. Changes nothing.

    Raises:
        UserError: all problems, a line each.
    """
    job = plan(request)
    queue.check_free(job.run_dir)
    for unchecked in check(job, local=request.local):
        note(unchecked)
    if job.note:
        note(job.note)
    return job, render(job)


def prepare_run_dir(request: Request, note: Note) -> tuple[Job, str]:
    """Like `prepare`, and makes the run directory.

    Raises:
        UserError: all problems, a line each; then nothing was made.
    """
    planned, script = prepare(request, note)
    job = reserve(request, planned)
    return job, script if job.run_dir == planned.run_dir else render(job)


def submit(request: Request, note: Note) -> tuple[Job, str]:
    """Queue the job of a request; the job and its id.

    Raises:
        UserError: something is wrong, or sbatch refused the job; then nothing is left behind.
    """
    queue.require_slurm()
    job, script = prepare_run_dir(request, note)
    return job, queue.submit(job, script)


def as_test(request: Request) -> Request:
    """The request as a short trial: two steps, ten minutes, on the site's partition for tests if there is one."""
    kind = KINDS[request.kind]
    settings = {"slurm.time": TEST_TIME, "slurm.warning_s": TEST_WARNING_S, "slurm.requeue": False}
    if kind.trainer is not None:
        settings["trainer.total_training_steps"] = TEST_STEPS
    if kind.name == "ppo":
        settings["critic.warmup_steps"] = 0
    return replace(request, settings={**request.settings, **settings}, is_test=True)
