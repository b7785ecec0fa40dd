"""Resume a run, or the unfinished runs of a sweep or a pipeline, from the last checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.run_dir import REQUEUE, RunDir
from hpc_rl.runs import control
from hpc_rl.runs.folders import submitting
from hpc_rl.runs.run_sets import RunSet, SweepDir, run_of, states
from hpc_rl.runs.status import STOPPED, RunStatus, in_slurm, place_of
from hpc_rl.slurm import commands
from hpc_rl.slurm.place import Place
from hpc_rl.slurm.states import ENDED
from hpc_rl.submission import queue
from hpc_rl.submission.edits import check_edits, edited_since
from hpc_rl.submission.resuming import check_again, start_of
from hpc_rl.submission.script.directives import environment_notes
from hpc_rl.submission.script.render import has_own_settings, write_support
from hpc_rl.submission.series.after import afterok, find_after_again
from hpc_rl.system.disk import own_disk
from hpc_rl.system.ownership import open_own


def requeue(target: RunDir | RunSet) -> str:
    """Queue a run again, or the runs of a sweep or a pipeline that did not complete. Return lines about what was done.

    A running job saves first. A job that has ended is submitted again with the script in its run directory, and resumes
    from its last checkpoint.

    Raises:
        UserError: a run was not queued by Slurm, has no script of this user's, or its job was submitted without
            requeueing; a stage still runs and blocks those after it; or sbatch refused a job. Then no run of a sweep or
            a pipeline is queued again.
    """
    RunDir(target.path).check_owner()
    with submitting(target.path):
        if isinstance(target, RunDir):
            return _requeue_run(target)
        return _requeue_sweep(target) if isinstance(target, SweepDir) else _requeue_pipeline(target)


def _requeue_run(run: RunDir) -> str:
    now = control.settled_status(run)
    if now.state == "COMPLETED":
        return f"run {run.name} has nothing to resume: its state is {now.state}"
    if now.state == "PENDING":
        return f"job {now.job_id} of run {run.name} is already waiting in the queue"
    if not run.script.is_file():
        raise UserError(f"run {run.name} has no {run.script.name}: submit it again with {control.naming_option(run)}")
    script = _script_of(run)
    edited = check_edits(run)
    if now.active:
        return "\n".join([_from_within(run, now, script), *edited])
    if now.job_id is not None and not in_slurm(run):
        raise UserError(
            f"run {run.name} was not queued by Slurm: run the command that started it again, with "
            f"{control.naming_option(run)}"
        )
    if now.left_no_log and (place := own_disk(run.path)):
        raise UserError(
            f"job {now.job_id} of run {run.name} has failed without a log, and {run.path} is on {place}, which looks "
            "like a disk of this machine alone: the next job would fail like that. Submit the run again with --run-dir "
            f"on a file system that the nodes share, or with {control.naming_option(run)} if they see this one"
        )
    after = find_after_again([run])
    notes = [*check_again([run]), *edited]
    run.stop.unlink(missing_ok=True)
    queued = queue.queue(script, after, place=place_of(run))
    queue.record_again(run, queued)
    queue.record_code([run])
    waits = f" after job {', '.join(after.job_ids)}" if after and after.job_ids else ""
    submitted = f"submitted job {queued.job_id}{waits}: run {run.name} {start_of(run)} (previous state: {now.state})"
    return "\n".join([submitted, *notes, *environment_notes(os.environ, run.script.read_text())])


def _from_within(run: RunDir, now: RunStatus, script: str) -> str:
    if not in_slurm(run):
        raise UserError(
            f"run {run.name} was not queued by Slurm: stop it, and run the command that started it again, "
            f"with {control.naming_option(run)}"
        )
    if not re.search(r"^hpc_rl_requeue='yes'|scontrol requeue", script, re.MULTILINE):
        raise UserError(
            f"job {now.job_id} of run {run.name} was submitted with slurm.requeue=false: "
            f"run hpc-rl stop {run.name} first, then hpc-rl requeue {run.name}"
        )
    said = run.read_status()
    if now.state == "COMPLETING" or (said.get("job_id") == now.job_id and said.get("state") in (*ENDED, STOPPED)):
        raise UserError(
            f"job {now.job_id} of run {run.name} is ending: wait until it has ended (hpc-rl status {run.name}), and "
            f"requeue {run.name} then"
        )
    control.ask_to_stop(run, REQUEUE)
    return f"job {now.job_id} of run {run.name} will save as soon as it can and then be requeued"


def _script_of(run: RunDir) -> str:
    """Return the script of a run, whose file of functions is there.

    Raises:
        UserError: somebody else could have written it, or it needs the functions of another version.
    """
    run.check_owner()
    script = _own_script(run.script)
    if has_own_settings(script) and edited_since(run):
        raise UserError(
            f"{run.config} was edited, but {run.script} of an earlier version of hpc-rl would replace it: submit the "
            f"run again with {control.naming_option(run)} and the edited options as key=value"
        )
    write_support(script, run.support)
    return script


def _own_script(path: Path) -> str:
    """Read a job script that this user wrote, and nobody else can have changed.

    Raises:
        UserError: somebody else could have written it.
    """
    try:
        with open_own(path.parent.resolve() / path.name) as script:
            return script.read()
    except OSError as error:
        raise UserError(
            f"{path} {error.strerror}, and would run as you: look at it, and submit the run again "
            f"(hpc-rl submit with {control.naming_option(RunDir(path.parent))}), which writes a new one"
        ) from error


def _requeue_pipeline(pipeline: RunSet) -> str:
    """Queue the stages from the first that ended without completing again, each after the one before it.

    Later stages that still wait are queued anew: Slurm will remove them, because the job that they wait for has failed.
    """
    found = control.settled_statuses(pipeline.runs())
    first = next((k for k, now in enumerate(found) if not now.active and now.state != "COMPLETED"), None)
    if first is None:
        return f"pipeline {pipeline.name} has nothing to resume: {states(found)}"
    before, again = found[:first], [now for now in found[first:] if now.state != "COMPLETED"]
    _refuse_blocked(pipeline, before, again)
    runs = [run_of(now) for now in again]
    scripts = [_script_of_stage(pipeline, now) for now in again]
    notes = check_again(runs, coming=pipeline.runs())
    notes += [line for run in runs for line in check_edits(run)]
    after = None if before else find_after_again([run_of(found[0])])
    options = after.sbatch_options if after else afterok([str(now.job_id) for now in before[-1:] if now.active])
    place = place_of(run_of(found[0]))
    waiting = [now for now in again if now.active]
    recorded = [run.read_job() for run in runs]
    submitted: list[str] = []
    try:
        for run, script in zip(runs, scripts, strict=True):
            run.stop.unlink(missing_ok=True)
            queued = queue.queue(script, None, afterok(submitted[-1:]) or options, place)
            submitted.append(queued.job_id)
            queue.record_again(run, queued)
        if waiting:
            _remove_from_queue(waiting, place)
    except BaseException as error:
        control.take_back([(job_id, runs[0]) for job_id in submitted], error)
        for run, job in zip(runs, recorded, strict=True):
            queue.write_job(run, job)
        raise
    queue.record_code(runs)
    jobs = (
        f"submitted jobs {submitted[0]} to {submitted[-1]}: {len(again)} of {len(found)} stages of pipeline "
        f"{pipeline.name}, from {again[0].run} on"
    )
    return "\n".join([jobs, *notes])


def _remove_from_queue(waiting: Sequence[RunStatus], place: Place) -> None:
    """Cancel jobs that wait. Slurm may remove them first, because the job that they wait for has failed.

    Nothing is written into the run directories, whose newest job would be the old one then.

    Raises:
        UserError: scancel failed, and one of them is still there.
    """
    job_ids = [str(now.job_id) for now in waiting]
    try:
        commands.cancel(*job_ids, place=place)
    except UserError as error:
        try:
            found = commands.job_states(job_ids, place=place)
        except commands.NoAnswer:
            raise error from None
        if not all(state.ended for state in found.values()):
            raise


def _refuse_blocked(pipeline: RunSet, before: Sequence[RunStatus], again: Sequence[RunStatus]) -> None:
    """Raise UserError if a stage runs that will not complete, or that a stage before it has to precede."""
    for now in before:
        if now.active and run_of(now).stop.exists():
            raise UserError(
                f"stage {now.run} was asked to stop and has not ended yet, so the stages after it would never start: "
                f"wait for it (hpc-rl status {pipeline.name}), and requeue {pipeline.name} then"
            )
    for now in again:
        if now.active and now.state != "PENDING":
            raise UserError(
                f"stage {now.run} is {now.state}, but {again[0].run} before it did not complete: wait for it or cancel "
                f"it (hpc-rl cancel {now.run}), and requeue {pipeline.name} then"
            )


def _script_of_stage(pipeline: RunSet, now: RunStatus) -> str:
    run = run_of(now)
    if not run.script.is_file() or (now.job_id is not None and not in_slurm(run)):
        raise UserError(
            f"stage {run.name} was not queued by Slurm: run the command that started pipeline {pipeline.name} again, "
            f"with --job-name {pipeline.name}"
        )
    return _script_of(run)


def _requeue_sweep(sweep: SweepDir) -> str:
    """Queue the runs that ended without completing again, as one array."""
    found = control.settled_statuses(sweep.runs())
    again = {
        number: now
        for number, now in enumerate(found, 1)
        if not now.active and now.state != "COMPLETED" and run_of(now).script.is_file()
    }
    if not again:
        return f"sweep {sweep.name} has nothing to resume: {states(found)}"
    if not sweep.script.is_file():
        raise UserError(f"sweep {sweep.name} has no {sweep.script.name}: requeue its runs one by one")
    script = _own_script(sweep.script)
    runs = [run_of(now) for now in again.values()]
    for run in runs:  # the array runs these scripts
        _script_of(run)
    notes = check_again(runs)
    notes += [line for run in runs for line in check_edits(run)]
    limit = re.search(r"^#SBATCH --array=\S*?(%\d+)$", script, re.MULTILINE)
    after = find_after_again(sweep.runs())
    for run in runs:
        run.stop.unlink(missing_ok=True)
    array = f"--array={','.join(map(str, again))}{limit[1] if limit else ''}"
    queued = queue.queue(script, after, [array], place_of(sweep.run(1)))
    for number, run in zip(again, runs, strict=True):
        queue.record_again(run, queued, number)
    queue.record_code(runs)
    before = states(again.values())
    submitted = (
        f"submitted job {queued.job_id}: {len(again)} of {len(found)} runs of sweep {sweep.name} are queued again "
        f"(previous states: {before})"
    )
    return "\n".join([submitted, *notes, *environment_notes(os.environ, script)])
