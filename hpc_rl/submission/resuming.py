"""What a run that is submitted again resumes from, and whether it can: its settings, its data and its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path

from hpc_rl.config.compose import load_config
from hpc_rl.config.kinds import KINDS
from hpc_rl.config.tree import OF_PLACE, changes, flat, read_options, read_tree
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.control import saved_by
from hpc_rl.submission.edits import edits, effective_edits
from hpc_rl.submission.job import Job
from hpc_rl.submission.preflight.checks import check
from hpc_rl.submission.series.after import After, results_of


def resumed(job: Job) -> list[str]:
    """Describe what a job resumes, and the settings that differ from its last attempt, one per line.

    Returns:
        The lines; none for a new run.

    Raises:
        UserError: the data has changed; see `check_again`.
    """
    run = job.run_dir
    if job.row.trainer is None:
        return []
    edited = effective_edits(job.config, edits(run, job.kind))
    note = [f"{run.config} was edited, and the job has these edits: {', '.join(edited)}"] if edited else []
    if run.attempt_with_settings() is None:
        return note
    try:
        before = flat(read_tree(run.latest_settings, named=False))
    except UserError as error:
        return [*note, f"run {run.name} resumes; the settings of its last attempt cannot be read: {error}"]
    changed = changes(before, flat(job.config.model_dump(mode="json")))
    if run.read_status().get("state") != "COMPLETED":
        note += _changed_data(job)
    head = f"run {run.name} {start_of(run)}"
    if not changed:
        return [*note, f"{head}, with the same settings as its last attempt"]
    lines = (f"  {key}: {text}" for key, text in changed.items())
    return [*note, f"{head}, with settings that differ from its last attempt:", *lines]


def start_of(run: RunDir) -> str:
    """Return what a run does when its job starts again: `resumes from step-00000040`, for example."""
    row = KINDS.get(str(run.read_job().get("kind")))
    if row is not None and row.trainer is None:
        return "starts again, and resumes if your program can"
    saved = saved_by(run)
    return f"resumes from {saved}" if saved else "starts from the beginning: it has no checkpoint"


def check_again(runs: Sequence[RunDir], coming: Sequence[RunDir] = ()) -> list[str]:
    """Check runs that are queued again unchanged, as when they were submitted. Return notes, one per line.

    Args:
        coming: runs that complete before them.

    Raises:
        UserError: all problems, a line each.
    """
    by_folder: dict[Path, list[Job]] = {}
    for job in filter(None, (_job_again(run, coming) for run in runs)):
        by_folder.setdefault(job.working_dir, []).append(job)
    notes: list[str] = []
    for folder, jobs in by_folder.items():
        with chdir(folder):
            notes += [*check(*jobs), *(line for job in jobs for line in _changed_data(job))]
    return notes


def _job_again(run: RunDir, coming: Sequence[RunDir]) -> Job | None:
    """Return the job that a run's script will run. None: it never started, or runs the user's own program."""
    about = run.read_job()
    row, folder = KINDS.get(str(about.get("kind"))), Path(str(about.get("working_dir", "")))
    if row is None or row.trainer is None or not run.config.is_file() or not folder.is_dir():
        return None
    results = frozenset(result for one in coming for result in results_of(one))
    return Job(row.name, load_config(row.name, run.config), run, folder, after=After("", (), results))


def refuse_completed(job: Job) -> None:
    """Raise UserError if a run has completed, and no setting has changed that would let it do more."""
    run = job.run_dir
    if job.row.trainer is None or run.read_status().get("state") != "COMPLETED" or not run.config.is_file():
        return
    after = flat(job.config.model_dump(mode="json"))
    if all(key.startswith(OF_PLACE) for key in changes(read_options(run.latest_settings), after)):
        raise UserError(
            f"run {run.name} has completed, and the job would have nothing to do: choose another --job-name, or let "
            "the run go on with a setting such as trainer.total_epochs"
        )


def _changed_data(job: Job) -> Iterator[str]:
    """Yield a note for each data file that was written again since the run began, but has the same size.

    Raises:
        UserError: a file has another size, and the run would resume in the middle of other data.
    """
    if saved_by(job.run_dir) is None:
        return
    before, now = job.run_dir.read_job().get("data"), job.data_state
    for file, (size, written) in now.items():
        then = before.get(file) if isinstance(before, dict) else None
        if not isinstance(then, list) or [size, written] == then:
            continue
        if size != then[0]:
            raise UserError(
                f"{file} has {size:,} bytes, and had {then[0]:,} when run {job.run_dir.name} was submitted: the run "
                "would resume in the middle of other data. Restore the file, or choose another --job-name"
            )
        yield f"{file} was written again after run {job.run_dir.name} was submitted: the run resumes in the new file"
