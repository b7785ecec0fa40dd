"""The only calls to Slurm's programs (submission itself goes through submitit). Each has a deadline."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from hpc_rl.errors import UserError
from hpc_rl.slurm import detect
from hpc_rl.slurm.accounting import COLUMNS, Start, read_starts
from hpc_rl.slurm.states import JobState, read_sacct, read_scontrol, read_squeue

TIMEOUT_S = 30
"""A controller under load answers within seconds; one that is down makes its clients wait."""


def available() -> bool:
    """Whether this machine can submit to Slurm."""
    return shutil.which("sbatch") is not None


class NoAnswer(Exception):
    """Slurm cannot be asked now: no programs here, or its controller does not answer. It says nothing about a job."""


def job_state(job_id: str) -> JobState | None:
    """The state of a job, or None where Slurm does not know it (any more).

    Asked in this order: sacct (complete, but only with accounting), squeue, scontrol (kept for minutes after the end).

    Raises:
        NoAnswer: none of them answered.
    """
    columns = "JobID,State,ExitCode,NodeList,Reason"
    recorded = read_sacct(_answer(["sacct", "-X", "-n", "-P", "--duplicates", "-o", columns, "-j", job_id]), job_id)
    # Accounting lags behind a requeue: as long as the controller knows the job, its word is newer.
    if recorded and recorded.ended and not _is_queued(job_id):
        return recorded
    queued = read_squeue(_answer(["squeue", "-h", "-t", "all", "-r", "-O", _SQUEUE_COLUMNS, "-j", job_id]), job_id)
    if queued and not queued.ended:
        return queued
    return _scontrol(job_id) or queued or recorded


def job_log(job_id: str) -> str | None:
    """Path of a job's log, as long as the controller remembers the job.

    Raises:
        NoAnswer: it does not answer.
    """
    state = _scontrol(job_id)
    return state.stdout or None if state else None


def job_starts(job_ids: Sequence[str]) -> list[Start]:
    """Every start of these jobs, oldest first; empty where there is no accounting."""
    return read_starts(_answer(["sacct", "-X", "-n", "-P", "--duplicates", "-o", COLUMNS, "-j", ",".join(job_ids)]))


def controller_text() -> str:
    """Settings of the cluster, and whether its controllers answer.

    Raises:
        NoAnswer: with scontrol's own words, as for the next two.
    """
    return _said(["scontrol", "show", "config"])


def partitions_text() -> str:
    """Every partition, a line each."""
    return _said(["scontrol", "show", "partition", "-o"])


def accounts_text(user: str) -> str:
    """The accounts that a user may charge, a line each."""
    return _said(["sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account"])


def cancel(job_id: str) -> None:
    """End a job.

    Raises:
        UserError: with scancel's own words.
    """
    try:
        result = _run(["scancel", job_id])
    except NoAnswer as error:
        raise UserError(str(error)) from error
    if result is None or result.returncode:
        raise UserError(f"scancel {job_id}: {_words(result)}")


def node_groups() -> list[detect.NodeGroup]:
    """What nodes there are, by partition and shape, hidden partitions too; empty where sinfo is missing or fails.

    Raises:
        NoAnswer: the controller does not answer.
    """
    return detect.read_sinfo(_answer(["sinfo", "-a", "-h", "-e", "-o", detect.SINFO_FORMAT]))


def partitions() -> list[detect.Partition]:
    """Every partition that this user sees.

    Raises:
        NoAnswer: as `node_groups`.
    """
    return detect.read_partitions(_answer(["scontrol", "show", "partition", "-o"]))


def configuration() -> dict[str, str]:
    """Slurm's configuration.

    Raises:
        NoAnswer: Slurm cannot be asked, with its own words.
    """
    result = _run(["scontrol", "show", "config"])
    if result is None or result.returncode:
        raise NoAnswer(_words(result))
    return detect.read_config(result.stdout)


def associations(user: str, cluster: str) -> list[detect.Association]:
    """The user's accounts on a cluster; empty without accounting.

    Raises:
        NoAnswer: as `node_groups`.
    """
    show = ["sacctmgr", "-nP", "show", "assoc", f"user={user}", f"format={detect.ASSOCIATION_COLUMNS}"]
    return detect.read_associations(_answer(show), cluster)


def has_pyxis() -> bool:
    """Whether srun runs containers by the pyxis plugin, whose options its help then has.

    Raises:
        NoAnswer: it takes too long.
    """
    return "--container-image" in _answer(["srun", "--help"])


_SQUEUE_COLUMNS = "JobArrayID:40|,State:30|,NodeList:400|,Reason:100|"


def _scontrol(job_id: str) -> JobState | None:
    result = _run(["scontrol", "show", "job", "-o", job_id])
    if result is None or (result.returncode and "Invalid job id" not in result.stderr):
        raise NoAnswer(f"Slurm does not answer: {_words(result)}")
    return read_scontrol(result.stdout)


def _is_queued(job_id: str) -> bool:
    return bool(_answer(["squeue", "-h", "-o", "%i", "-j", job_id]).strip())


def _answer(argv: list[str]) -> str:
    """Standard output, or nothing where the program is missing or fails: the next source is asked."""
    result = _run(argv)
    return result.stdout if result is not None and result.returncode == 0 else ""


def _said(argv: list[str]) -> str:
    result = _run(argv)
    if result is None or result.returncode:
        raise NoAnswer(f"{' '.join(argv[:3])}: {_words(result)}")
    return result.stdout


def _run(argv: list[str]) -> subprocess.CompletedProcess[str] | None:
    """The finished command, or None where there is no such program."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"Slurm does not answer: {argv[0]} took over {TIMEOUT_S} s") from error


def _words(result: subprocess.CompletedProcess[str] | None) -> str:
    if result is None:
        return "its programs are not on PATH"
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {result.returncode}"
