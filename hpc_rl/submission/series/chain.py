"""A chain: stages that train one after the other, each on the model that the previous stage exports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from hpc_rl.config.kinds import trained
from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.errors import UnclearError, UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.control import take_back
from hpc_rl.runs.status import place_of
from hpc_rl.slurm import commands
from hpc_rl.submission import queue
from hpc_rl.submission.job import Job
from hpc_rl.submission.launch import notes_on
from hpc_rl.submission.local import check_local
from hpc_rl.submission.request import JobRequest, reserve
from hpc_rl.submission.request import plan as plan_job
from hpc_rl.submission.script.directives import environment_notes
from hpc_rl.submission.script.render import render
from hpc_rl.submission.series.after import After
from hpc_rl.submission.series.stages import check_models


def plan(requests: Sequence[JobRequest], local: bool = False) -> tuple[list[tuple[Job, str]], list[str]]:
    """Check all stages; return their jobs and scripts, and notes on what could not be checked. Changes nothing.

    Raises:
        UserError: a stage is invalid, or does not fit the previous stage.
    """
    if len(requests) < 2:
        raise UserError("a chain needs at least two stages: hpc-rl chain sft KEY=VALUE ... -- ppo KEY=VALUE ...")
    if local and requests[0].after is not None:
        raise UserError("--local starts immediately: leave out --after")
    jobs: list[Job] = []
    nodes = commands.NodeListing()
    for number, request in enumerate(requests, 1):
        _check_stage(number, request)
        jobs.append(_planned(request, jobs, nodes))
    if len({job.run_dir for job in jobs}) < len(jobs):
        raise UserError("two stages have the same run directory: give each its own --job-name")
    for number, job in enumerate(jobs[:-1], 1):
        trainer = job.config.trainer
        if not (isinstance(trainer, TrainingConfig) and trainer.export):
            raise UserError(f"stage {number} ({job.kind}) exports no model: leave out trainer.export=false")
    for number, job in enumerate(jobs, 1):
        try:
            check_models(job, jobs[: number - 1])
        except UserError as error:
            raise UserError(f"stage {number} ({job.kind}): {error}") from error
    for job in jobs:
        queue.check_free(job.run_dir, job.kind)
        if local:
            check_local(job)
    stages = [(job, render(job)) for job in jobs]
    environment = [] if local else [line for _, script in stages for line in environment_notes(os.environ, script)]
    return stages, [*notes_on(jobs, local), *dict.fromkeys(environment)]


def submit(planned: Sequence[Job]) -> list[tuple[Job, str]]:
    """Queue every stage, to start when the previous stage has completed; return the jobs and their ids.

    Raises:
        UnclearError: a stage may be in the queue. The stages before it are cancelled, and all run directories stay.
        UserError: sbatch refused a stage. Then the stages before it are cancelled, and nothing is left behind.
    """
    made = []
    submitted: list[tuple[Job, str]] = []
    try:
        for stage in planned:
            is_new = not stage.run_dir.path.exists()
            job = reserve(stage)
            if is_new or job.run_dir != stage.run_dir:
                made.append(job.run_dir.path)
            if submitted:
                before, job_id = submitted[-1]
                job = _on_model_of(job, before.run_dir, (job_id,))
            submitted.append((job, queue.submit(job, render(job))))
    except BaseException as error:
        take_back([(job_id, job.run_dir) for job, job_id in submitted], error)
        for path in made:
            if path.exists() and not isinstance(error, UnclearError):
                queue.remove(path)
        raise
    return submitted


def _planned(request: JobRequest, before: Sequence[Job], nodes: commands.NodeListing) -> Job:
    """Return the job of a stage, which trains the model of the previous stage."""
    if not before:
        return plan_job(request, nodes=nodes)
    model = before[-1].run_dir.model
    request = replace(request, settings={**request.settings, "model.path": str(model)})
    job = plan_job(request, frozenset(job.run_dir.name for job in before), nodes)
    return _on_model_of(job, before[-1].run_dir, ())


def _on_model_of(job: Job, before: RunDir, job_ids: tuple[str, ...]) -> Job:
    """Let a job start after the stage with this run directory, and train its model."""
    config = job.config.updated("model.path", str(before.model))
    place = place_of(before) if job_ids else None
    return replace(job, config=config, after=After(str(before.path), job_ids, frozenset({before.model}), place))


def _check_stage(number: int, request: JobRequest) -> None:
    if request.kind not in trained():
        raise UserError(
            f"stage {number} is {request.kind}: a chain is made of {', '.join(trained())}; "
            "start your own program after a run with hpc-rl submit --after RUN"
        )
    if number == 1:
        return
    if request.after is not None:
        raise UserError(f"stage {number} ({request.kind}) starts after stage {number - 1}: leave out --after")
    if any(word.lstrip("+").startswith("model.path=") for word in request.overrides):
        raise UserError(f"stage {number} ({request.kind}) trains the model of stage {number - 1}: leave out model.path")
