"""A pipeline: its stages are jobs that start one after the other, each on the results of those before it.

All jobs are queued at once, with dependencies, so that nothing but Slurm has to run between two stages. If one does not
complete, Slurm removes those after it from the queue; `hpc-rl requeue NAME` queues them again from that stage on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rl.config.groups import groups
from hpc_rl.config.pipeline import ROUND, PlannedStage, expand, load_pipeline
from hpc_rl.config.training.common import TrainingConfig
from hpc_rl.config.tree import changes, flat, read_options
from hpc_rl.errors import UnclearError, UserError
from hpc_rl.runs.control import take_back
from hpc_rl.runs.folders import ROOT, is_pipeline, submitting
from hpc_rl.runs.run_sets import PipelineDir
from hpc_rl.runs.status import place_of, status_of
from hpc_rl.slurm import commands
from hpc_rl.submission import queue
from hpc_rl.submission.job import Job
from hpc_rl.submission.launch import notes_on
from hpc_rl.submission.request import JobRequest, free_name
from hpc_rl.submission.request import plan as plan_job
from hpc_rl.submission.script.render import render
from hpc_rl.submission.series.after import COMPLETED, After
from hpc_rl.submission.series.stages import check_models, check_responses
from hpc_rl.system.files import write_atomically
from hpc_rl.tracking.recorded import STAGE


@dataclass(frozen=True)
class PipelineRequest:
    """What the user asks for."""

    pipeline: str
    """File, or name of a shipped pipeline."""
    words: Sequence[str] = ()
    """NAME=VALUE for a value of the pipeline, and STAGE.KEY=VALUE for an option of one stage."""
    settings: Mapping[str, Any] | None = None
    """Dotted key -> value for all stages that do not set it, from flags such as --nodes."""
    rounds: int | None = None
    """Replaces the number of rounds of the file."""
    name: str | None = None
    after: str | None = None
    """A job id, a run, a sweep or a pipeline that has to complete before the first stage starts."""
    site: str | None = None
    local: bool = False
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedPipeline:
    """A checked pipeline."""

    folder: PipelineDir
    stages: list[PlannedStage]
    jobs: list[Job]
    scripts: list[str]
    notes: list[str]


def plan(asked: PipelineRequest) -> PlannedPipeline:
    """Expand a pipeline, and check and render all of its stages. Changes nothing.

    Raises:
        UserError: the pipeline or a stage is invalid; the message lists all problems of the first such stage.
    """
    config = load_pipeline(asked.pipeline)
    stem = Path(asked.pipeline).stem
    folder = PipelineDir((ROOT / (asked.name or free_name(stem))).absolute())
    if asked.local and asked.after is not None:
        raise UserError("--local starts immediately: leave out --after")
    if folder.path.exists() and not asked.local:
        raise UserError(
            f"{folder.path} exists: choose another --job-name, or resume it with hpc-rl requeue {folder.name}"
        )
    given, of_stages = _sorted_words(asked.words, {*config.before, *config.stages})
    stages = expand(config, given, asked.rounds or config.rounds, folder.path)
    if folder.path.exists():
        _check_same(folder, stages)
    nodes = commands.NodeListing()
    jobs: list[Job] = []
    for stage in stages:
        request = _request(asked, stage, of_stages.get(stage.name, []), folder)
        try:
            job = plan_job(request if jobs else replace(request, after=asked.after), nodes=nodes)
            check_models(job, jobs)
            check_responses(job, jobs)
        except UserError as error:
            raise UserError(f"stage {stage.name}: {error}") from error
        if isinstance(job.config.trainer, TrainingConfig) and not job.config.trainer.export:
            raise UserError(f"stage {stage.name} exports no model: leave out trainer.export=false")
        if jobs:
            coming = jobs[-1].coming | {stages[len(jobs) - 1].result}
            job = replace(job, after=After(str(jobs[-1].run_dir.path), (), coming))
        jobs.append(job)
    for job in jobs:
        _check_completed(job)
    return PlannedPipeline(folder, stages, jobs, [render(job) for job in jobs], notes_on(jobs, asked.local))


def submit(planned: PlannedPipeline) -> list[str]:
    """Create all run directories, queue every stage after the one before it, and return the job ids.

    Raises:
        UnclearError: a stage may be in the queue. The stages before it are cancelled, and all run directories stay.
        UserError: sbatch refused a stage, or another process has just created the folder. Then nothing is left behind.
    """
    folder = planned.folder
    job_ids: list[str] = []
    if not queue.reserve(folder.path):
        raise UserError(f"{folder.path} has just been created by another process: choose another --job-name")
    try:
        with submitting(folder.path):
            prepare(planned)
            for job, script in zip(planned.jobs, planned.scripts, strict=True):
                if job_ids and job.after:
                    place = place_of(planned.jobs[0].run_dir)
                    job = replace(job, after=replace(job.after, job_ids=(job_ids[-1],), place=place))
                job_ids.append(queue.submit(job, script))
    except BaseException as error:
        take_back([(job_id, planned.jobs[0].run_dir) for job_id in job_ids], error)
        if not isinstance(error, UnclearError):
            queue.remove(folder.path)
        raise
    return job_ids


def prepare(planned: PlannedPipeline) -> None:
    """Fill the folder, which exists: share it with slurm.group, and write pipeline.json.

    Stages that it has from later rounds stay in the record.

    Raises:
        UserError: the group does not exist, or the user is not a member.
    """
    if (group := planned.jobs[0].config.slurm.group) is not None:
        queue.share(planned.folder.path, group)
    stages = _recorded(planned.stages)
    record = {
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(planned.jobs[0].command),
        "stages": [*stages, *planned.folder.values()[len(stages) :]],
    }
    write_atomically(planned.folder.record, json.dumps(record, indent=2) + "\n")


def _recorded(stages: Sequence[PlannedStage]) -> list[dict[str, str]]:
    """Return the stages as pipeline.json has them."""
    return [{ROUND: str(stage.round), STAGE: stage.name} for stage in stages]


def _check_same(folder: PipelineDir, stages: Sequence[PlannedStage]) -> None:
    """Check that a folder that exists has these stages, or those of fewer or more rounds.

    Raises:
        UserError: it is the folder of another pipeline, or of something else.
    """
    pairs = zip(folder.values(), _recorded(stages), strict=False)
    if not is_pipeline(folder.path) or any(before != now for before, now in pairs):
        raise UserError(f"{folder.path} exists, and is not this pipeline: choose another --job-name")


def _check_completed(job: Job) -> None:
    """Check that a stage that has completed, and does not run again, had the settings that it would have now.

    Raises:
        UserError: it had others. Those of Slurm do not count, nor options that its version did not have yet.
    """
    if not job.run_dir.path.is_dir() or status_of(job.run_dir).state != COMPLETED:
        return
    before = read_options(job.run_dir.latest_settings)
    old = [key for key in before if not key.startswith("slurm.")]
    if changed := [
        f"{key}: {text}"
        for key, text in changes(before, flat(job.config.model_dump(mode="json"))).items()
        if key in old
    ]:
        raise UserError(
            f"stage {job.run_dir.name} has completed with other settings ({'; '.join(changed)}): give the same ones to "
            "continue, or start again with another --job-name"
        )


def _sorted_words(words: Sequence[str], stages: set[str]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Sort words of the command line into values, and overrides by stage.

    Raises:
        UserError: a word is not NAME=VALUE.
    """
    import yaml

    values: dict[str, Any] = {}
    of_stages: dict[str, list[str]] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(
                f"{word!r} is not an option: write NAME=VALUE for a value of the pipeline, or STAGE.KEY=VALUE for an "
                "option of a stage"
            )
        stage, dot, rest = key.partition(".")
        if dot and stage in stages:
            of_stages.setdefault(stage, []).append(f"{rest}={value}")
            continue
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"{word}: the value cannot be read as YAML") from error
    return values, of_stages


def _request(asked: PipelineRequest, stage: PlannedStage, overrides: Sequence[str], folder: PipelineDir) -> JobRequest:
    """Return the request of a stage. Options on the command line replace those of the file, and these the flags."""
    run_dir = folder.run(stage.round, stage.name).path
    typed = {word.partition("=")[0].lstrip("+") for word in overrides}
    known = groups()
    chosen = [f"{key}={value}" for key, value in stage.options.items() if key in known and key not in typed]
    own = {key: value for key, value in stage.options.items() if key not in typed and key not in known}
    flags = {key: value for key, value in (asked.settings or {}).items() if key not in typed}
    return JobRequest(
        kind=stage.kind,
        overrides=[*chosen, *overrides],
        settings={**flags, **own, "slurm.job_name": run_dir.name},
        run_dir=run_dir,
        site=asked.site,
        local=asked.local,
        command=asked.command,
    )
