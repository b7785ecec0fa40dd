"""A sweep: one Slurm array, one run directory for each combination of values."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_rl import __version__
from hpc_rl.config.compose import compose_each
from hpc_rl.config.job import JobConfig
from hpc_rl.errors import UnclearError, UserError
from hpc_rl.runs.folders import ROOT, submitting
from hpc_rl.runs.models import models_of_runs
from hpc_rl.runs.run_sets import SweepDir
from hpc_rl.sites.profile import load_profile
from hpc_rl.slurm import commands
from hpc_rl.slurm.place import here
from hpc_rl.submission import queue
from hpc_rl.submission.devices import Devices
from hpc_rl.submission.job import Job
from hpc_rl.submission.launch import notes_on
from hpc_rl.submission.request import JobRequest, free_name, job_of, typed_run_dir
from hpc_rl.submission.script.directives import LOGIN_SHELL, directives, environment_notes, option_of
from hpc_rl.submission.script.render import directive_word, fill, log_folder, render
from hpc_rl.submission.series.grid import Point, grid
from hpc_rl.system.files import write_atomically

_OWN_OPTIONS = ("job-name", "output")
"""Directives that may differ between the points of a sweep: the array has its own."""


@dataclass(frozen=True)
class PlannedSweep:
    """A planned sweep: everything is checked, and nothing has been created."""

    sweep: SweepDir
    points: Sequence[Point]
    jobs: Sequence[Job]
    scripts: Sequence[str]
    """The scripts of the points, in order."""
    script: str
    """The script of the array."""
    notes: Sequence[str]
    """What could not be checked on this machine."""


def plan(request: JobRequest, max_parallel: int | None) -> PlannedSweep:
    """Check every point and render its script. Changes nothing.

    Args:
        request: the sweep as typed; keys with several values are swept.
        max_parallel: maximum number of points that run at a time; None: as many as fit.

    Raises:
        UserError: a point's configuration is invalid, or the points request different resources from Slurm.
    """
    request.trust_its_group()
    site = load_profile(request.site).values
    models, devices = models_of_runs(may_come=request.after is not None), Devices()

    def composed(words: Sequence[str], each: Sequence[Sequence[str]]) -> list[JobConfig]:
        return compose_each(request.kind, words, each, request.settings, site, [models, devices.fill_in], request.typed)

    common, points = grid(request.overrides, lambda words: _most_tasks(composed(words, [()])[0]))
    configs = composed(common, [point.overrides for point in points])
    stem = free_name(f"{request.kind}-sweep")
    first = job_of(request, configs[0], frozenset(), devices)
    sweep = SweepDir((typed_run_dir(request) or ROOT / (configs[0].slurm.job_name or stem)).absolute())
    if sweep.path.exists():
        raise UserError(
            f"{sweep.path} exists: choose another --job-name, or resume it with hpc-rl requeue {sweep.name}"
        )
    found = []
    for number, config in enumerate(configs, 1):
        run_dir = sweep.run(number)
        found.append(replace(first, config=config.updated("slurm.job_name", run_dir.name), run_dir=run_dir))
    notes = notes_on(found)
    scripts = [render(job) for job in found]
    _check_same_resources(points, scripts)
    script = array_script(sweep, request.kind, scripts, max_parallel)
    return PlannedSweep(sweep, points, found, scripts, script, [*notes, *environment_notes(os.environ, script)])


def _most_tasks(config: JobConfig) -> int:
    """Return the most tasks of an array in the cluster of a job, or in any of its clusters."""
    return min(commands.max_array_size(here(os.environ, cluster)) for cluster in config.slurm.clusters.split(","))


def array_script(sweep: SweepDir, kind: str, scripts: Sequence[str], max_parallel: int | None) -> str:
    """Return the script of the array: the directives of its points, and a line that runs the script of the task."""
    tasks = f"1-{len(scripts)}" + (f"%{max_parallel}" if max_parallel else "")
    log = f"{log_folder(sweep.path / sweep.name)}_%a/job-%A_%a.log"
    asked = directives(scripts[0])
    has_name = any(option_of(line) == "job-name" for line in asked)  # unless slurm.leave_out removes it
    return fill(
        "sweep.sbatch.j2",
        {
            "title": f"{sweep.name}: a sweep of {len(scripts)} {kind} runs, rendered by hpc-rl {__version__}.",
            "name": sweep.name,
            "login_shell": scripts[0].startswith(LOGIN_SHELL),
            "directives": [
                *([f"#SBATCH --job-name={directive_word(sweep.name)}"] if has_name else []),
                f"#SBATCH --array={tasks}",
                *(line for line in asked if option_of(line) not in _OWN_OPTIONS),
                f"#SBATCH --output={directive_word(log)}",
            ],
            "runs": f"{sweep.path / sweep.name}_",
        },
    )


def submit(planned: PlannedSweep) -> str:
    """Create every run directory, queue the array and return its job id. If sbatch refuses, nothing is left behind.

    Raises:
        UnclearError: the array may be in the queue. The run directories stay.
        UserError: sbatch refused, or another process has just created a sweep of this name.
    """
    sweep = planned.sweep
    if not queue.reserve(sweep.path):
        raise UserError(f"{sweep.path} has just been created by another process: choose another --job-name")
    with submitting(sweep.path):
        return _submit(planned)


def _submit(planned: PlannedSweep) -> str:
    sweep, after, keeps = planned.sweep, planned.jobs[0].after, False
    waits = {"after": after.target} if after else {}
    try:
        if (group := planned.jobs[0].config.slurm.group) is not None:
            queue.share(sweep.path, group)
        code = queue.git_snapshot(planned.jobs[0].working_dir)
        for job, script in zip(planned.jobs, planned.scripts, strict=True):
            queue.prepare(job, script, code)
        write_atomically(sweep.script, planned.script, forbidden=0o022)
        record = {
            "kind": planned.jobs[0].kind,
            "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": list(planned.jobs[0].command),
            "points": [point.values for point in planned.points],
        }
        write_atomically(sweep.record, json.dumps(record, indent=2) + "\n")
        queued = queue.queue(planned.script, after)
        keeps = True
    except UnclearError:
        keeps = True
        for job in planned.jobs:
            queue.record(job, None, queue.asked_place(planned.script, after), **waits)
        raise
    finally:
        if not keeps:
            queue.remove(sweep.path)
    for number, job in enumerate(planned.jobs, 1):
        queue.record(job, f"{queued.job_id}_{number}", queued.place, **waits)
    return queued.job_id


def _check_same_resources(points: Sequence[Point], scripts: Sequence[str]) -> None:
    asked = [[line for line in directives(script) if option_of(line) not in _OWN_OPTIONS] for script in scripts]
    for point, lines in zip(points, asked, strict=True):
        if lines != asked[0]:
            mine, first = (sorted(set(a) - set(b)) for a, b in ((lines, asked[0]), (asked[0], lines)))
            shown = " ".join(f"{key}={value}" for key, value in point.values.items())
            raise UserError(
                f"{shown} requests {_said(mine)} from Slurm, but the first run requests {_said(first)}: "
                "all runs of an array request the same resources, so submit a separate sweep for each"
            )


def _said(lines: Sequence[str]) -> str:
    return " ".join(line.removeprefix("#SBATCH ") for line in lines) or "no such option"
