"""The path of every submission: plan, check, render, reserve, queue."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import replace

from hpc_rl.adapters.table import description
from hpc_rl.config.kinds import KINDS
from hpc_rl.submission import queue
from hpc_rl.submission.job import Job
from hpc_rl.submission.local import check_local
from hpc_rl.submission.planning import check_fit, check_host, expected, on_fewest_nodes, plan_of_job, rows_notes
from hpc_rl.submission.preflight.checks import check
from hpc_rl.submission.request import JobRequest, plan, reserve
from hpc_rl.submission.resources import granted_bytes
from hpc_rl.submission.resuming import refuse_completed, resumed
from hpc_rl.submission.script.directives import environment_notes
from hpc_rl.submission.script.render import render

Note = Callable[[str], None]
"""Receives each sentence about what was chosen for the user, and about what could not be checked."""

TEST_TIME = "10:00"
TEST_WARNING_S = 60


def prepare(request: JobRequest, note: Note) -> tuple[Job, str]:
    """Plan and check the job of a request; return the job and its script. Changes nothing.

    Raises:
        UserError: the request is invalid; the message lists all problems, one per line.
    """
    if request.fewest_nodes:
        request, chosen = on_fewest_nodes(request)
        note(chosen)
    job = plan(request)
    queue.check_free(job.run_dir, job.kind)
    refuse_completed(job)
    if request.local:
        check_local(job)
    script = render(job)
    notes = notes_on([job], request.local)
    if job.row.takes_program:
        notes.append(description(job.adapter, job.adapted))
    if not request.local:
        found = plan_of_job(job)
        notes += rows_notes(job, found)
        if found is not None:
            notes += check_fit(found, job.size, request.force, granted_bytes(job.config))
            notes += check_host(found, granted_bytes(job.config), request.force)
            job = replace(job, facts=expected(job.kind, found))
        notes += environment_notes(os.environ, script)
    for line in notes:
        note(line)
    return job, script


def notes_on(jobs: Sequence[Job], local: bool = False) -> list[str]:
    """Check jobs; return what could not be checked, what was chosen for the user, and what is resumed.

    Raises:
        UserError: all problems, a line each.
    """
    with chdir(jobs[0].working_dir):  # that of a lender is its run's
        found = check(*jobs, local=local)
    chosen = dict.fromkeys(job.note for job in jobs if job.note)
    return [*found, *chosen, *(line for job in jobs for line in resumed(job))]


def make_run_dir(planned: Job, script: str) -> tuple[Job, str]:
    """Create the run directory of a prepared job; return the job and its script.

    Both have another name if the planned one has been taken in the meantime.
    """
    job = reserve(planned)
    return job, script if job.run_dir == planned.run_dir else render(job)


def submit(request: JobRequest, note: Note) -> tuple[Job, str]:
    """Queue the job of a request; return the job and its id.

    Raises:
        UserError: the request is invalid, or sbatch refused the job. Then nothing is left behind.
    """
    queue.require_slurm()
    job, script = make_run_dir(*prepare(request, note))
    return job, queue.submit(job, script)


def as_test(request: JobRequest) -> JobRequest:
    """Turn a request into a short trial: two steps, ten minutes, on the site's test partition if there is one."""
    settings = {"slurm.time": TEST_TIME, "slurm.warning_s": TEST_WARNING_S, "slurm.requeue": False}
    settings |= KINDS[request.kind].test_settings
    return replace(request, settings={**request.settings, **settings}, is_test=True)
