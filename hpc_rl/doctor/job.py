"""The doctor's short job: submit it or run it here, wait for it, and read the reports of its nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from hpc_rl.config.compose import compose
from hpc_rl.config.job import JobConfig
from hpc_rl.doctor.checks import Check, has_problem, problem
from hpc_rl.doctor.nodes import judge
from hpc_rl.doctor.training import report, training_checks
from hpc_rl.errors import UserError
from hpc_rl.formats import acceptance
from hpc_rl.formats.counted import counted
from hpc_rl.formats.node_report import NodeReport
from hpc_rl.images.run_options import image_preflight
from hpc_rl.run_dir import RunDir
from hpc_rl.runs import control
from hpc_rl.runs.stages import Stages
from hpc_rl.runs.status import current_job, status_of
from hpc_rl.sites.profile import load_profile
from hpc_rl.submission import queue
from hpc_rl.submission.job import Job
from hpc_rl.submission.local import check_local, run_local
from hpc_rl.submission.preflight.folders import check_run_dir
from hpc_rl.submission.preflight.partition import check_partition, partition_request
from hpc_rl.submission.request import JobRequest, plan, reserve
from hpc_rl.submission.script.render import render
from hpc_rl.system.files import read_end

KIND = "doctor"
_LOG_BYTES = 2**20
"""At the end of a log that are read for its last line."""
SHORT = {"slurm.time": "10:00", "slurm.warning_s": 60, "slurm.requeue": False}
"""Settings of the doctor's job, which take precedence over those of a profile."""
TRAIN_TIME = "1:00:00"
"""Walltime with the training checks, which usually take some minutes: a hanging check waits for its deadline."""
TRAIN_START_S = 300
"""Limit of the start of all nodes with the training checks, as in a job."""
TRAIN = "train"
"""The word by which `hpc_rl.node.health.check` runs the training checks."""


@dataclass(frozen=True)
class Findings:
    """What a doctor's job has found."""

    checks: list[Check]
    training: list[Check] = field(default_factory=list)
    """Empty without --train."""
    report: str = ""
    """The training checks as a text for a bug report; empty if there are none."""

    @property
    def everything(self) -> list[Check]:
        return [*self.checks, *self.training]


def doctor_config(overrides: Sequence[str], settings: Mapping[str, Any], site: str | None) -> JobConfig:
    """Compose the options that any job would have here."""
    return compose(KIND, overrides, settings, load_profile(site).values)


def doctor_job(
    nodes: int,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
    run_dir: Path | None,
    site: str | None,
    *,
    local: bool,
    trains: bool = False,
) -> Job:
    """Return the job, with a run directory of its own.

    Args:
        trains: whether the job runs the training checks too.

    Raises:
        UserError: the options are wrong, the partition has no such nodes, or the directory is not empty or cannot be
            created.
    """
    named = {text.partition("=")[0].lstrip("+") for text in overrides} | settings.keys()
    if "trainer.nnodes" in named:
        raise UserError("set the number of nodes with --on-nodes only")
    defaults = {**SHORT, "slurm.time": TRAIN_TIME, "ray.start_timeout_s": TRAIN_START_S} if trains else SHORT
    short = {key: value for key, value in defaults.items() if key not in named}
    settings = {**short, **settings, "trainer.nnodes": nodes}
    request = JobRequest(KIND, overrides, settings=settings, run_dir=run_dir, site=site, local=local)
    planned = replace(plan(request), program=(TRAIN,) if trains else ())
    ask = None if local else partition_request(planned.config)
    if ask is not None:
        check_partition(ask, planned.nodes)
    for check in image_preflight(planned.config.container):
        check(planned.config.container)
    if local:
        check_local(planned)
    path = planned.run_dir.path
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"{path} is not empty: the doctor needs an empty folder, which it removes at the end")
    check_run_dir(path)
    render(planned)
    return reserve(planned)


def run_on_nodes(job: Job, local: bool, note: Callable[[str], None]) -> Findings:
    """Run the job to its end and return what it found. The run directory stays only if there is a problem.

    Ctrl-C cancels the job.

    Args:
        note: called with messages about the progress.
    """
    run = job.run_dir
    try:
        if local:
            run_local(job, render(job), lambda: None)
        else:
            job_id = queue.submit(job, render(job))
            note(f"submitted job {job_id} on {counted(job.config.trainer.nnodes, 'node')}; Ctrl-C cancels it")
            stages = Stages(run, note)
            control.wait(run, stages.poll, stages.saw)
    except KeyboardInterrupt:
        submitted = current_job(run)
        if submitted is not None and not local:
            control.cancel_ids([(submitted, run)])
            left = f"its files are in {run.path}" if run.attempts() else "it had not started"
            note(f"cancelled job {submitted}; {left}")
            if not run.attempts():
                queue.remove(run.path)
        raise
    found = read_findings(run, trains=TRAIN in job.program)
    if has_problem(found.everything):
        note(f"the job's files are in {run.path}")
    else:
        queue.remove(run.path)
    return found


def read_findings(run: RunDir, trains: bool) -> Findings:
    """Return what an ended job has found.

    Raises:
        UserError: a report is not readable.
    """
    attempts = run.attempts()
    files = sorted(attempts[-1].glob("node*.report.json")) if attempts else []
    try:
        reports = [NodeReport.read(file) for file in files]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise UserError(f"a report in {attempts[-1]} is not readable ({error!r}): run the doctor again") from error
    if not reports:
        return Findings(_without_reports(run))
    if not trains:
        return Findings(judge(reports))
    lines = acceptance.read(acceptance.results_file(attempts[-1]))
    training = training_checks(lines)
    text = report(reports, training, lines, date.today().isoformat(), Path.home(), os.environ.get("USER", ""))
    return Findings(judge(reports), training, text)


def _without_reports(run: RunDir) -> list[Check]:
    """Return why an ended job has no reports."""
    ended = status_of(run)
    state = f"job {ended.job_id} is {ended.state}{f' ({ended.reason})' if ended.reason else ''}"
    log = Path(ended.log) if ended.log else None
    if log is None or not log.exists():
        where = f"its nodes wrote nothing to {run.path}"
        return [
            problem("shared folder", f"{state}; {where}", "put runs on a file system that all nodes share (--run-dir)")
        ]
    lines = [line for line in read_end(log, _LOG_BYTES).decode(errors="replace").splitlines() if line.strip()]
    return [problem("job", f"{state}: {lines[-1] if lines else 'its log is empty'}", f"see its log {log}")]
