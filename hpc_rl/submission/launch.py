"""The path of every submission: plan, check, render, reserve, queue."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hpc_rl.config.compose import load_tree
from hpc_rl.config.keys import flat
from hpc_rl.config.kinds import KINDS
from hpc_rl.runs.control import newest_checkpoint
from hpc_rl.submission import queue
from hpc_rl.submission.job import Job
from hpc_rl.submission.preflight.checks import check
from hpc_rl.submission.request import Request, plan, reserve
from hpc_rl.submission.script import render

Note = Callable[[str], None]
"""Receives each sentence about what was chosen for the user, and about what could not be checked."""

TEST_STEPS = 2
TEST_TIME = "10:00"
TEST_WARNING_S = 60


def prepare(request: Request, note: Note) -> tuple[Job, str]:
    """Plan and check the job of a request; return the job and its script. Changes nothing.

    Raises:
        UserError: the request is invalid; the message lists all problems, one per line.
    """
    job = plan(request)
    queue.check_free(job.run_dir)
    for unchecked in check(job, local=request.local):
        note(unchecked)
    if job.note:
        note(job.note)
    for line in resumed(job):
        note(line)
    return job, render(job)


def resumed(job: Job) -> list[str]:
    """Describe what a job resumes, and the settings that differ from its last attempt, one per line.

    Returns:
        The lines; none for a new run.
    """
    if not job.run_dir.config.is_file() or job.row.trainer is None:
        return []
    before = flat(load_tree(job.run_dir.config))
    after = flat(job.config.model_dump(mode="json"))
    changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    saved = newest_checkpoint(job.run_dir)
    start = f"resumes from {saved}" if saved else "starts from the beginning: it has no checkpoint"
    head = f"run {job.run_dir.name} {start}"
    if not changed:
        return [f"{head}, with the same settings as its last attempt"]
    lines = [f"{key}: {_shown(before, key)} -> {_shown(after, key)}" for key in changed]
    return [f"{head}, with settings that differ from its last attempt:", *(f"  {line}" for line in lines)]


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "not set"


def make_run_dir(request: Request, planned: Job, script: str) -> tuple[Job, str]:
    """Create the run directory of a prepared job; return the job and its script.

    Both have another name if the planned one has been taken in the meantime.
    """
    job = reserve(request, planned)
    return job, script if job.run_dir == planned.run_dir else render(job)


def submit(request: Request, note: Note) -> tuple[Job, str]:
    """Queue the job of a request; return the job and its id.

    Raises:
        UserError: the request is invalid, or sbatch refused the job. Then nothing is left behind.
    """
    queue.require_slurm()
    job, script = make_run_dir(request, *prepare(request, note))
    return job, queue.submit(job, script)


def as_test(request: Request) -> Request:
    """Turn a request into a short trial: two steps, ten minutes, on the site's test partition if there is one."""
    kind = KINDS[request.kind]
    settings = {"slurm.time": TEST_TIME, "slurm.warning_s": TEST_WARNING_S, "slurm.requeue": False}
    if kind.trainer is not None:
        settings["trainer.total_training_steps"] = TEST_STEPS
    if kind.name == "ppo":
        settings["critic.warmup_steps"] = 0
    return replace(request, settings={**request.settings, **settings}, is_test=True)
