"""A chain: stages that train one after the other, each on the model that the one before it exports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpc_rl.config.training import TrainingConfig
from hpc_rl.errors import UserError
from hpc_rl.slurm import commands
from hpc_rl.submission import preflight, queue
from hpc_rl.submission.after import After
from hpc_rl.submission.local import check_local
from hpc_rl.submission.request import Request
from hpc_rl.submission.script import TRAINERS, Job, render


@dataclass(frozen=True)
class Stage:
    """A job of the chain, checked and rendered."""

    job: Job
    script: str


def plan(requests: Sequence[Request], local: bool = False) -> tuple[list[Stage], list[str]]:
    """The stages, all of them checked, and notes on what could not be. Nothing is made.

    Raises:
        UserError: a stage is wrong, or does not fit to the one before it.
    """
    if len(requests) < 2:
        raise UserError("a chain has two stages or more: hpc-rl chain sft KEY=VALUE ... -- ppo KEY=VALUE ...")
    for number, request in enumerate(requests, 1):
        _check_stage(number, request)
    planned = _linked(requests, Request.job)
    for number, job in enumerate(planned[:-1], 1):
        trainer = job.config.trainer
        if not (isinstance(trainer, TrainingConfig) and trainer.export):
            raise UserError(f"stage {number} ({job.kind}) exports no model: leave out trainer.export=false")
    for job in planned:
        queue.check_free(job.run_dir)
        if local:
            check_local(job)
    notes = preflight.check(*planned, local=local)
    return [Stage(job, render(job)) for job in planned], notes


def submit(requests: Sequence[Request]) -> list[tuple[Job, str]]:
    """Queue every stage, to start when the one before it is done; jobs and their ids. Plan it first.

    Raises:
        UserError: sbatch refused one; then those before it are cancelled, and nothing is left behind.
    """
    made = []

    def reserve(request: Request) -> Job:
        planned = request.job()
        is_new = not planned.run_dir.path.exists()
        job = request.reserve()
        if is_new:
            made.append(job.run_dir.path)
        return job

    submitted: list[tuple[Job, str]] = []
    try:
        for job in _linked(requests, reserve):
            if submitted:
                assert job.after is not None
                job = replace(job, after=replace(job.after, job_ids=(submitted[-1][1],)))
            submitted.append((job, queue.submit(job, render(job))))
    finally:
        if len(submitted) < len(requests):
            if submitted:
                commands.cancel(*(job_id for _, job_id in submitted))
            for path in made:
                if path.exists():
                    queue.remove(path)
    return submitted


def _linked(requests: Sequence[Request], make: Callable[[Request], Job]) -> list[Job]:
    """The stages' jobs, each with the model of the one before it."""
    found: list[Job] = []
    for request in requests:
        if found:
            before = found[-1].run_dir
            settings = {**request.settings, "model.path": str(before.model)}
            request = replace(request, settings=settings, taken=frozenset(job.run_dir.name for job in found))
            found.append(replace(make(request), after=After(str(before.path), (), before.model)))
        else:
            found.append(make(request))
    paths = [job.run_dir.path for job in found]
    if len(set(paths)) < len(paths):
        raise UserError("two stages have the same run directory: give each a --job-name of its own")
    return found


def _check_stage(number: int, request: Request) -> None:
    if request.kind not in TRAINERS:
        raise UserError(
            f"stage {number} is {request.kind}: a chain is made of {' and '.join(TRAINERS)}; "
            "a program of your own starts after a run by hpc-rl submit --after RUN"
        )
    if number == 1:
        return
    if request.after is not None:
        raise UserError(f"stage {number} ({request.kind}) starts after stage {number - 1}: leave out --after")
    if any(word.lstrip("+").startswith("model.path=") for word in request.overrides):
        raise UserError(f"stage {number} ({request.kind}) trains the model of stage {number - 1}: leave out model.path")
