"""Find a run by its path, name or job id."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.folders import ROOT, is_pipeline, is_run, is_sweep, remembered_folders, runs_below
from hpc_rl.runs.status import job_log
from hpc_rl.slurm import commands


def find_run(target: str) -> RunDir:
    """Find the run directory that a user names by its path, its name below ./runs, or its job id.

    Raises:
        UserError: there is no such run; the message suggests the nearest name.
    """
    for path in (Path(target), *named_paths(target)):
        try:
            if is_run(path):
                return RunDir(path.absolute())
        except PermissionError as error:
            raise UserError(f"{path} cannot be read, because it belongs to another user: {error.strerror}") from error
        if is_sweep(path) or is_pipeline(path):
            raise _names_several(target, path)
    if re.fullmatch(r"\d+(_\d+)?", target):
        return _run_of_job(target)
    if Path(target).is_dir():
        raise UserError(f"{target} is a folder, but not a run directory (it has no job.sbatch and no config.yaml)")
    names = sorted(path.name for path in runs_below(ROOT))
    close = difflib.get_close_matches(target, names, n=1, cutoff=0.4)
    raise UserError(
        f"no run {target!r} in {ROOT.absolute()}: "
        + (f"did you mean {close[0]}?" if close else "give a run directory, a run's name or a job id")
    )


def named_paths(name: str) -> tuple[Path, Path]:
    """Return where a run of this name may be: in ROOT, or in a sweep or a pipeline there."""
    return ROOT / name, ROOT / name.rpartition("_")[0] / name


def newest_run() -> str:
    """Return the path of the run below ./runs that was submitted last.

    Raises:
        UserError: there is none.
    """
    jobs = [job for path in runs_below(ROOT) if (job := RunDir(path).job).is_file()]
    if not jobs:
        raise UserError(f"no run was submitted from here: {ROOT.absolute()} has none; name a run directory or a job id")
    return str(max(jobs, key=lambda job: job.stat().st_mtime_ns).parent)


def _run_of_job(job_id: str) -> RunDir:
    found: list[RunDir] = []
    for folder in dict.fromkeys([ROOT.absolute(), *remembered_folders()]):
        for path in runs_below(folder) if not found else ():  # the runs below the working folder come first
            run = RunDir(path.absolute())
            ids = [str(record.get("job_id")) for record in (run.read_job(), run.read_status())]
            if job_id in ids or job_log(run, job_id).is_file():
                found.append(run)
            elif any(known.startswith(f"{job_id}_") for known in ids):
                raise _names_several(job_id, path.parent)
    if len(found) > 1:  # of several clusters, or of one that has begun to count again
        raise UserError(f"job {job_id} belongs to several runs: name one of {', '.join(run.name for run in found)}")
    if found:
        return found[0]
    where = f"job {job_id} does not belong to a run in {ROOT.absolute()} or another folder of your runs"
    try:
        log = commands.job_log(job_id)
        state = commands.job_state(job_id, commands.LOOK_S) if log is None else None
    except commands.NoAnswer as error:
        raise UserError(f"{where}, and {error}") from error
    if log is None:
        past = (
            f"in Slurm's accounting it is {state.state}, without the path of its log"
            if state
            else "Slurm has no record of it: without accounting, Slurm forgets a job some minutes after its end"
        )
        raise UserError(f"{where}, and {past}; name the run or its directory")
    if not is_run(Path(log).parent):
        raise UserError(f"job {job_id} is not a run of hpc-rl: its log is {log}")
    return RunDir(Path(log).parent)


def _names_several(target: str, path: Path) -> UserError:
    """Return the error for a command that takes a single run."""
    if is_sweep(path):
        return UserError(f"{target} is a sweep: name one of its runs, such as {path.name}_1 (hpc-rl runs {target})")
    return UserError(f"{target} is a pipeline: name one of its runs (hpc-rl status {target} lists them)")
