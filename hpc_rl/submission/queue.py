"""Put a job into the queue: reserve its run directory, fill it, and call sbatch."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import UnclearError, UserError
from hpc_rl.liveness.activity import doing
from hpc_rl.run_dir import RunDir
from hpc_rl.runs import control
from hpc_rl.runs.folders import ROOT, SUBMISSION, is_run, remember, submitting
from hpc_rl.slurm import commands
from hpc_rl.slurm.place import Place, is_single
from hpc_rl.software import git
from hpc_rl.software.secrets import hidden, refuse_secrets
from hpc_rl.submission.edits import edits, without
from hpc_rl.submission.job import Job
from hpc_rl.submission.script.directives import clusters_of
from hpc_rl.submission.script.render import write_support
from hpc_rl.submission.series.after import After
from hpc_rl.system.files import write_atomically
from hpc_rl.system.processes import deferred_interrupts

SHARED_MODE = 0o2750
"""Permissions of a run directory with slurm.group: files that are created in it belong to the group too (setgid)."""
GIT_MAX_BYTES = 1_000_000


def check_free(run: RunDir, kind: str) -> None:
    """Check that a run directory is free for a job of a kind: it holds one job at a time, and runs of one kind.

    Raises:
        UserError: its job is queued or running, it is of another kind, or the folder contains something else.
    """
    if not run.path.is_dir():
        return  # the preflight checks report a folder that cannot be created
    if not is_run(run.path) and any(path.name != SUBMISSION for path in run.path.iterdir()):
        raise UserError(f"{run.path} is neither empty nor a run directory; choose another --run-dir or --job-name")
    if (earlier := run.read_job().get("kind", kind)) != kind:
        raise UserError(
            f"{run.path} is a run of the kind {earlier}, and {kind} was requested: choose another --job-name or "
            "--run-dir"
        )
    now = control.settled_status(run)
    if now.active:
        raise UserError(
            f"run {run.name} is {now.state} as job {now.job_id} in {run.path}: "
            f"wait for it, end it (hpc-rl stop {run.name}), or choose another --job-name"
        )


def reserve(path: Path) -> bool:
    """Create the folder of a run or sweep; return False if it exists, so that two submissions never share one."""
    for parent in reversed([folder for folder in path.parents if not folder.exists()]):
        parent.mkdir(mode=0o755, exist_ok=True)  # whatever the umask: nobody else may replace a run
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return False
    return True


@contextmanager
def reserved(job: Job) -> Iterator[bool]:
    """Hold a run directory, from the check that it is free to the record of its job.

    Yields:
        whether it is new. It is created if it does not exist.

    Raises:
        UserError: it is not free, another submission holds it, or other users could write to it.
    """
    run = job.run_dir
    reserve(run.path)
    run.check_owner(job.config.slurm.group)
    with submitting(run.path):
        check_free(run, job.kind)
        yield not is_run(run.path)


def prepare(job: Job, script: str, code: str | None = None) -> None:
    """Fill the run directory with the script, the settings and a snapshot of the code. `record` adds job.json.

    Args:
        code: the snapshot, if it was taken already for several runs.

    Raises:
        UserError: the script or the settings contain a secret, or the settings are longer than what can be read.
    """
    settings = job.settings
    refuse_secrets({"the job script": script, "the configuration": settings or ""})
    reserve(job.run_dir.path)
    job.run_dir.check_owner(job.config.slurm.group)
    job.run_dir.path.chmod(stat.S_IMODE(job.run_dir.path.stat().st_mode) & ~0o022)
    if job.config.slurm.group is not None:
        share(job.run_dir.path, job.config.slurm.group)
    write_support(script, job.run_dir.support)
    if settings is not None:
        unedited = without(job.config, edits(job.run_dir, job.kind))
        write_atomically(job.run_dir.config, settings, forbidden=0o022)
        write_atomically(job.run_dir.written, unedited, forbidden=0o022)
    write_atomically(job.run_dir.script, script, forbidden=0o022)
    write_atomically(job.run_dir.git, git_snapshot(job.working_dir) if code is None else code)


def share(folder: Path, group: str) -> None:
    """Let a UNIX group read a folder; files created in it belong to the group too (setgid).

    Raises:
        UserError: the group does not exist, or the user is not a member.
    """
    try:
        shutil.chown(folder, group=group)
        folder.chmod(SHARED_MODE)
    except (LookupError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such group"
        raise UserError(f"slurm.group {group}: {reason}; choose a group that `id` lists for you") from error


def record(job: Job, job_id: str | None, place: Place | None = None, **more: object) -> None:
    """Write job.json, and remember where the run is.

    Args:
        job_id: None if it is not known: the job states it in status.json when it starts.
        place: the cluster of the job, if Slurm has queued it.
    """
    facts = {
        **({} if job_id is None else {"job_id": job_id}),
        **({} if place is None else {"place": place.record()}),
        "kind": job.kind,
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(job.command),
        "working_dir": str(job.working_dir),
        "data": job.data_state,
        **job.facts,
        **more,
    }
    write_job(job.run_dir, facts)
    remember(job.run_dir.path.parent)


def record_again(run: RunDir, queued: QueuedJob, task: int | None = None) -> None:
    """Update job.json of a run that was submitted again unchanged.

    Args:
        task: the number of the run's task in an array.
    """
    job_id = queued.job_id if task is None else f"{queued.job_id}_{task}"
    again = {"job_id": job_id, "place": queued.place.record(), "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_job(run, {**run.read_job(), **again})


def write_job(run: RunDir, facts: Mapping[str, object]) -> None:
    """Write job.json."""
    write_atomically(run.job, json.dumps(facts, indent=2) + "\n")


def record_code(runs: Sequence[RunDir]) -> None:
    """Update the snapshot of the code of runs that were submitted again."""
    folders = [Path(str(run.read_job().get("working_dir", Path.cwd()))) for run in runs]
    found = {folder: git_snapshot(folder) for folder in set(folders)}
    for run, folder in zip(runs, folders, strict=True):
        write_atomically(run.git, found[folder])


def require_slurm() -> None:
    if not commands.available():
        raise UserError("no sbatch on PATH: run this on a login node of a Slurm cluster, or here with --local")


def submit(job: Job, script: str) -> str:
    """Queue the script of a job and return the job id.

    Raises:
        UnclearError: the job may be in the queue. A new run directory stays.
        UserError: sbatch refused. Then, and after Ctrl-C, nothing is left behind.
    """
    waits = {"after": job.after.target} if job.after else {}
    with reserved(job) as is_new:
        job.run_dir.stop.unlink(missing_ok=True)  # written for an earlier job
        keeps = not is_new
        try:
            prepare(job, script)
            queued = queue(script, job.after)
            keeps = True
        except UnclearError:
            keeps = True
            if is_new:
                record(job, None, asked_place(script, job.after), **waits)
            raise
        finally:
            if not keeps:
                remove(job.run_dir.path)
        record(job, queued.job_id, queued.place, **waits)
        return queued.job_id


def asked_place(script: str, after: After | None) -> Place | None:
    """Return the cluster that a script is submitted to; None if Slurm chooses one of several."""
    from hpc_rl.submission.executor import place_for

    found = (after.place if after else None) or place_for(script, os.environ)
    return found if is_single(found.cluster) else None


@dataclass(frozen=True)
class QueuedJob:
    """A job that Slurm has accepted."""

    job_id: str
    place: Place
    """The cluster that has it."""


def _named(place: Place) -> str:
    return f"cluster {place.cluster}" if place.cluster else "the local cluster"


def queue(
    script: str, after: After | None = None, options: Sequence[str] = (), place: Place | None = None
) -> QueuedJob:
    """Submit a script with sbatch.

    Ctrl-C takes effect after sbatch has answered, which has a deadline: an interrupted submission may still have been
    accepted.

    Args:
        after: the jobs that its job waits for.
        place: the cluster that the job has to be in, because its run is there. None for that of the jobs to wait for,
            or else the one that the script or the environment asks for.

    Raises:
        UserError: the script asks for other clusters, the jobs to wait for are in another one, or sbatch refused.
        KeyboardInterrupt: the user pressed Ctrl-C, and the job was cancelled.
    """
    from hpc_rl.submission.executor import ScriptExecutor

    if after is not None:
        if place is not None and after.place is not None and place.cluster != after.place.cluster:
            raise UserError(
                f"the run is in {_named(place)}, and the jobs of {after.target}, which it waits for, are in "
                f"{_named(after.place)}: a job can wait for jobs of its own cluster only"
            )
        options, place = [*options, *after.sbatch_options], place or after.place
    asked = clusters_of(script)
    if place is not None and not place.may_be_in(asked):
        raise UserError(
            f"the job has --clusters={asked}, but its run, or the job that it waits for, is in {_named(place)}: leave "
            "the option out, or submit it as a new run with another --job-name"
        )
    with deferred_interrupts() as interrupted, tempfile.TemporaryDirectory() as folder:
        try:
            executor = ScriptExecutor(Path(folder), script, options, place)
            queued = QueuedJob(executor.submit_script(), executor.place)
        except commands.NoAnswer as error:
            raise UserError(str(error)) from error
    if interrupted():
        commands.cancel(queued.job_id, place=queued.place)
        raise KeyboardInterrupt
    return queued


def remove(folder: Path) -> None:
    """Remove the folder of a run or sweep whose submission failed, and ./runs if it is empty then."""
    shutil.rmtree(folder)
    if folder.parent == ROOT.absolute() and not any(folder.parent.iterdir()):
        folder.parent.rmdir()


@doing("recording the state of the code with git")
def git_snapshot(folder: Path) -> str:
    """Describe commit, branch and uncommitted changes of the repository that contains a folder, if there is one."""
    head = git.commit(folder)
    if head is None:
        return f"{folder} is not in a git repository\n"
    changes = git.changes(folder)
    if len(changes) > GIT_MAX_BYTES:
        changes = changes[:GIT_MAX_BYTES] + "\n[cut]\n"
    changes = hidden(changes)
    return f"{head}branch {git.branch(folder)}\n{changes or 'no uncommitted changes'}".rstrip() + "\n"
