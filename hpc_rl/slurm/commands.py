"""The only calls to Slurm's programs (submission itself goes through submitit). Each has a deadline."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from hpc_rl.errors import UserError
from hpc_rl.slurm import cluster
from hpc_rl.slurm.accounting import COLUMNS, Start, read_starts
from hpc_rl.slurm.states import JobState, newer, read_sacct, read_scontrol, read_squeue, sacct_states, squeue_states

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
    recorded = read_sacct(_answer([*_SACCT, array_id(job_id)]), job_id)
    # Accounting lags behind a requeue: as long as the controller knows the job, its word is newer.
    if recorded and recorded.ended and not _is_queued(job_id):
        return recorded
    queued = read_squeue(_answer([*_SQUEUE, job_id]), job_id)
    if queued and not queued.ended:
        return queued
    return _scontrol(job_id) or queued or recorded


def job_states(job_ids: Iterable[str]) -> dict[str, JobState]:
    """States of many jobs by one question to sacct and one to squeue; without those that Slurm does not know.

    How a job ended is told with its exit code only where there is accounting.

    Raises:
        NoAnswer: the controller does not answer.
    """
    asked = set(job_ids)
    if not asked:
        return {}
    ids = ",".join(sorted({array_id(job_id) for job_id in asked}))
    recorded = sacct_states(_answer([*_SACCT, ids]))
    result = _run([*_SQUEUE, ids])
    if result is None or (result.returncode and "Invalid job id" not in result.stderr):
        raise NoAnswer(f"Slurm does not answer: {_words(result)}")
    queued = squeue_states(result.stdout)
    return {job_id: state for job_id in asked if (state := newer(recorded.get(job_id), queued.get(job_id)))}


def array_id(job_id: str) -> str:
    """`12` of task `12_3`: accounting has no line for a task that has not started."""
    return job_id.partition("_")[0]


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


def attach_argv(job_id: str, node: str, command: Sequence[str], terminal: bool) -> list[str]:
    """srun's arguments for a command beside a job's own processes, on one of its nodes.

    Raises:
        UserError: the controller does not know the job.
    """
    try:
        result = _run(["scontrol", "show", "job", "-o", job_id])
    except NoAnswer as error:
        raise UserError(str(error)) from error
    # srun's --jobid takes no 12_3: every task of an array also has a number of its own.
    match = re.match(r"JobId=(\d+)", result.stdout) if result is not None else None
    if match is None:
        raise UserError(f"scontrol show job {job_id}: {_words(result)}")
    where = ["--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    return ["srun", f"--jobid={match[1]}", "--overlap", *where, *(["--pty"] if terminal else []), *command]


def cancel(*job_ids: str) -> None:
    """End jobs.

    Raises:
        UserError: with scancel's own words.
    """
    try:
        result = _run(["scancel", *job_ids])
    except NoAnswer as error:
        raise UserError(str(error)) from error
    if result is None or result.returncode:
        raise UserError(f"scancel {' '.join(job_ids)}: {_words(result)}")


def node_groups() -> list[cluster.NodeGroup]:
    """What nodes there are, by partition and shape, hidden partitions too; empty where sinfo is missing or fails.

    Raises:
        NoAnswer: the controller does not answer.
    """
    return cluster.read_sinfo(_answer(["sinfo", "-a", "-h", "-e", "-o", cluster.SINFO_FORMAT]))


def partitions() -> list[cluster.Partition]:
    """Every partition of the cluster, hidden ones too.

    Raises:
        NoAnswer: Slurm cannot be asked, with its own words, as for the next two.
    """
    return cluster.read_partitions(_said(["scontrol", "show", "partition", "-o", "-a"]))


def configuration() -> tuple[dict[str, str], dict[str, bool]]:
    """Slurm's settings, and its controllers: host -> whether it is up."""
    text = _said(["scontrol", "show", "config"])
    return cluster.read_config(text), cluster.read_controllers(text)


def expected_start(job_id: str) -> str | None:
    """When Slurm expects a pending job to start (squeue(1), --start); None if it has no estimate."""
    try:
        said = _said(["squeue", "--noheader", "--start", f"--jobs={job_id}", "--format=%S"]).split()
    except NoAnswer:
        return None
    return said[0].replace("T", " ") if said and said[0][:1].isdigit() else None


def max_array_size() -> int:
    """Most tasks that an array may have on this cluster; Slurm's default if it cannot be asked (slurm.conf(5))."""
    try:
        config, _ = configuration() if available() else ({}, {})
    except NoAnswer:
        config = {}
    return int(config.get("MaxArraySize", 1001)) - 1


def associations(name: str) -> list[cluster.Association]:
    """This user's accounts on a cluster."""
    user = f"user={pwd.getpwuid(os.getuid()).pw_name}"
    show = ["sacctmgr", "-nP", "show", "assoc", user, f"format={cluster.ASSOCIATION_COLUMNS}"]
    return cluster.read_associations(_said(show), name)


def has_pyxis() -> bool:
    """Whether srun runs containers by the pyxis plugin, whose options its help then has.

    Raises:
        NoAnswer: it takes too long.
    """
    return "--container-image" in _answer(["srun", "--help"])


_SACCT = ["sacct", "-X", "-n", "-P", "--duplicates", "-o", "JobID,State,ExitCode,NodeList,Reason", "-j"]
_SQUEUE = ["squeue", "-h", "-t", "all", "-r", "-O", "JobArrayID:40|,State:30|,NodeList:400|,Reason:100|", "-j"]


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
    environ = {**os.environ, "SLURM_BITSTR_LEN": "0"}  # never `12_[1,3,...]` (sacct's manual page)
    try:
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"Slurm does not answer: {argv[0]} took over {TIMEOUT_S} s") from error


def _words(result: subprocess.CompletedProcess[str] | None) -> str:
    if result is None:
        return "its programs are not on PATH"
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {result.returncode}"
