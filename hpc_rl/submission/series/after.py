"""The jobs that a job waits for: `--after RUN`, or the previous stage of a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.config.kinds import KINDS
from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.finding import find_run
from hpc_rl.runs.run_sets import find_run_set
from hpc_rl.runs.status import NOT_SUBMITTED, UNKNOWN, in_slurm, place_of, statuses_of
from hpc_rl.slurm import commands
from hpc_rl.slurm.place import Place, is_single

COMPLETED = "COMPLETED"


@dataclass(frozen=True)
class After:
    """The jobs that have to complete before a job starts."""

    target: str
    """Run directory or job id; job.json keeps it for another submission."""
    job_ids: tuple[str, ...]
    """Slurm jobs to wait for; empty if all of them have completed already."""
    coming: frozenset[Path] = frozenset()
    """Files and folders that exist once they have completed, such as an exported model."""
    place: Place | None = None
    """The cluster of the jobs to wait for, which has to be that of the new job."""

    @property
    def sbatch_options(self) -> list[str]:
        """Return the options for sbatch."""
        return afterok(self.job_ids)


def afterok(job_ids: Sequence[str]) -> list[str]:
    """Return sbatch's options for a job that starts after others have completed; none without others.

    Without the second option, a job whose dependency cannot be met would stay in the queue forever.
    """
    return [f"--dependency=afterok:{':'.join(job_ids)}", "--kill-on-invalid-dep=yes"] if job_ids else []


def is_coming(path: str, coming: frozenset[Path]) -> bool:
    """Return whether this file or folder, or one above it, is coming, and does not exist here yet."""
    place = Path(path).absolute()
    return not coming.isdisjoint([place, *place.parents]) and not place.exists()


def find_after(target: str, place: Place) -> After:
    """Find the jobs that `--after TARGET` names: a run, a sweep, a pipeline, or any Slurm job.

    Args:
        place: the cluster of the new job, in which a job of another program has to be.

    Raises:
        UserError: there is no such job, or it did not complete successfully, so that a job after it would never start.
    """
    several = find_run_set(target)
    if several is not None:
        return _after_runs(target, several.path, several.runs())
    if target.isdigit():
        return _after_job(target, place)
    run = find_run(target)
    return _after_runs(target, run.path, [run])


def find_after_again(found: Sequence[RunDir]) -> After | None:
    """Find the jobs that some runs were submitted to wait for; return None if one of the runs has started since then.

    Raises:
        UserError: as `find_after`.
    """
    target = found[0].read_job().get("after")
    return None if not target or any(map(_has_started, found)) else find_after(str(target), place_of(found[0]))


def _has_started(run: RunDir) -> bool:
    said = run.read_status()
    return bool(said.get("attempt")) and said.get("job_id") == run.read_job().get("job_id")


def _after_runs(target: str, path: Path, found: list[RunDir]) -> After:
    waited, places = [], set()
    for run, now in zip(found, statuses_of(found), strict=True):
        if now.state == NOT_SUBMITTED or (now.active and not in_slurm(run)):
            raise UserError(f"--after {target}: run {now.run} has no Slurm job")
        if now.state == UNKNOWN or now.is_last_recorded:
            raise UserError(f"--after {target}: the state of run {now.run} is unknown: {now.reason}")
        if now.ended and now.state != COMPLETED:
            raise UserError(
                f"--after {target}: run {now.run} is {now.state}, so a job after it would never start; "
                f"start it again with hpc-rl requeue {path.name}"
            )
        if now.active:
            waited.append(str(now.job_id))
            places.add(place_of(run))
    if len(places) > 1:
        raise UserError(
            f"--after {target}: its jobs are in several clusters, but a job can wait for jobs of one cluster only"
        )
    coming = frozenset(result for run in found for result in results_of(run))
    return After(str(path), tuple(waited), coming, next(iter(places), None))


def results_of(run: RunDir) -> set[Path]:
    """Return the files and folders that a run writes for others. The user's own program may write model/."""
    row = KINDS.get(str(run.read_job().get("kind")))
    if row is None or row.result is None:
        return {run.model}
    return {row.result_in(run.path), *([run.responses] if row.name == "eval" else [])}


def _after_job(job_id: str, place: Place) -> After:
    if not is_single(place.cluster):
        raise UserError(
            f"--after {job_id}: the job may go to several clusters ({place.cluster}), each of which has job ids of its "
            "own: set slurm.sbatch.clusters to the one that has this job"
        )
    if not commands.available():  # the script is rendered here and submitted on another machine
        return After(job_id, (job_id,))
    try:
        state = commands.job_state(job_id, place=place)
    except commands.NoAnswer as error:
        raise UserError(f"--after {job_id}: {error}") from error
    if state is None:
        raise UserError(
            f"--after {job_id}: Slurm has no record of this job, as is usual some minutes after the end of a job on a "
            "cluster without accounting. Check the job id, or leave --after out if the job has completed"
        )
    if state.ended and state.state != COMPLETED:
        raise UserError(f"--after {job_id}: this job is {state.state}, so a job after it would never start")
    return After(job_id, () if state.ended else (job_id,), place=None if state.ended else place)
