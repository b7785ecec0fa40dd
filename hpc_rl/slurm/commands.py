"""The only calls to Slurm's programs, except for submission, which submitit does. Each question has a deadline."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.liveness.activity import doing
from hpc_rl.slurm import cluster
from hpc_rl.slurm.accounting import COLUMNS, JobStart, read_starts
from hpc_rl.slurm.place import NoAnswer as NoAnswer
from hpc_rl.slurm.place import Place, here, is_single
from hpc_rl.slurm.states import JobState, newer, read_sacct, read_scontrol, read_squeue, sacct_states, squeue_states

TIMEOUT_S = 30
"""A controller under load answers within seconds. If it is down, its clients block."""
LOOK_S = 5
"""Deadline for a user who looks at a run. After it, the state that the job itself recorded is shown."""
_LEAST_S = 0.5
"""Time for a program if the deadline of the question has almost passed."""


def available() -> bool:
    """Return whether this machine can submit to Slurm."""
    return shutil.which("sbatch") is not None


def job_state(job_id: str, within_s: float = TIMEOUT_S, place: Place | None = None) -> JobState | None:
    """Return the state of a job, or None if Slurm has no record of it.

    The sources are sacct (complete, but it needs accounting), then squeue, then scontrol (until minutes after the end).

    Args:
        within_s: seconds for all of them together.
        place: the cluster that has the job; None for the one that new jobs go to.

    Raises:
        NoAnswer: the controller did not answer in time.
    """
    deadline = time.monotonic() + within_s
    accounts = _recorded(array_id(job_id), within_s, place)
    recorded = read_sacct(accounts or "", job_id)
    # Accounting lags behind a requeue. While the job is in the queue, the controller is more recent.
    if recorded and recorded.ended and not _is_queued(job_id, deadline, place):
        return recorded
    queued = read_squeue(_output([*_SQUEUE, job_id], deadline, place), job_id)
    if queued and not queued.ended:
        return queued
    found = _scontrol(job_id, deadline, place) or queued or recorded
    if found is None and accounts is None:
        raise NoAnswer(_SILENT_ACCOUNTS)
    return found


def job_states(job_ids: Iterable[str], within_s: float = TIMEOUT_S, place: Place | None = None) -> dict[str, JobState]:
    """Return the states of many jobs with one call of sacct and one of squeue. Unknown jobs are left out.

    Exit codes are available only with accounting.

    Args:
        within_s: seconds for both of them together.
        place: the cluster that has all of them; None for the one that new jobs go to.

    Raises:
        NoAnswer: the controller did not answer in time.
    """
    deadline = time.monotonic() + within_s
    asked = set(job_ids)
    if not asked:
        return {}
    ids = ",".join(sorted({array_id(job_id) for job_id in asked}))
    accounts = _recorded(ids, within_s, place)
    recorded = sacct_states(accounts or "")
    queued = squeue_states(_asked([*_SQUEUE, ids], deadline, place))
    found = {job_id: state for job_id in asked if (state := newer(recorded.get(job_id), queued.get(job_id)))}
    if accounts is None and len(found) < len(asked):
        raise NoAnswer(_SILENT_ACCOUNTS)
    return found


def array_id(job_id: str) -> str:
    """Return `12` for task `12_3`: accounting has no line for a task that has not started."""
    return job_id.partition("_")[0]


def job_log(job_id: str) -> str | None:
    """Return the path of a job's log, or None if the controller has no record of the job.

    Raises:
        NoAnswer: the controller does not answer.
    """
    state = _scontrol(job_id, time.monotonic() + LOOK_S, None)
    return state.stdout or None if state else None


def job_starts(job_ids: Sequence[str], place: Place) -> list[JobStart]:
    """Return every start of these jobs, oldest first; none without accounting, or if it does not answer."""
    asked = ["sacct", "-X", "-n", "-P", "--duplicates", "-o", COLUMNS, "-j", ",".join(job_ids)]
    try:
        return read_starts(_output(asked, place=place))
    except NoAnswer:
        return []


def attach_argv(job_id: str, place: Place, node: str, command: Sequence[str], terminal: bool) -> list[str]:
    """Return the srun command that runs a command within a running job, on one of its nodes.

    Raises:
        UserError: the controller has no record of the job.
    """
    try:
        result = _run(["scontrol", "show", "job", "-o", job_id], place=place)
    except NoAnswer as error:
        raise UserError(str(error)) from error
    # srun's --jobid does not accept 12_3, but every task of an array also has its own number.
    match = re.search(r"^JobId=(\d+)", result.stdout, re.MULTILINE) if result is not None else None
    if match is None:
        raise UserError(f"scontrol show job {job_id}: {_message(result)}")
    where = ["--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    return [
        "srun",
        *place.words("srun"),
        f"--jobid={match[1]}",
        "--overlap",
        *where,
        *(["--pty"] if terminal else []),
        *command,
    ]


def job_of_log(folder: Path, place: Place) -> str | None:
    """Return the id of this user's job whose log is in a folder; None if the controller has no record of one.

    The name of a job may be that of others too.

    Raises:
        NoAnswer: the controller does not answer.
    """
    listed = _asked(_SQUEUE_LOGS, time.monotonic() + TIMEOUT_S, place)
    folders = {folder, Path(str(folder).replace("%", "%%"))}  # some versions show the pattern of --output
    found = [[field.strip() for field in line.split("|")] for line in listed.splitlines() if "|" in line]
    return next((job_id for job_id, log, *_ in found if Path(log).parent in folders), None)


def cancel(*job_ids: str, place: Place, within_s: float = TIMEOUT_S, only_waiting: bool = False) -> None:
    """Cancel jobs of one cluster.

    Args:
        only_waiting: whether jobs that have started go on.

    Raises:
        UserError: scancel failed, or took longer than `within_s` seconds. The message is that of scancel.
    """
    try:
        states = ["--state=PENDING"] if only_waiting else []
        result = _run(["scancel", *states, *job_ids], time.monotonic() + within_s, place)
    except NoAnswer as error:
        ids = f"job {job_ids[0]}" if len(job_ids) == 1 else f"{len(job_ids)} jobs"
        raise UserError(f"{error}, so {ids} may or may not be cancelled: look again with hpc-rl status") from error
    if result is None or result.returncode:
        raise UserError(f"scancel {' '.join(job_ids)}: {_message(result)}")


def node_groups(place: Place | None = None) -> list[cluster.NodeGroup]:
    """Return the nodes by partition and shape, including hidden partitions. Empty if sinfo is missing or fails.

    Raises:
        NoAnswer: the controller does not answer.
    """
    return cluster.read_sinfo(_output(["sinfo", "-a", "-h", "-e", "-o", cluster.SINFO_FORMAT], place=place))


class NodeListing:
    """The nodes that sinfo lists, for one command of the user: sinfo is called when they are first needed, and once."""

    def __init__(self) -> None:
        self._found: dict[str, list[cluster.NodeGroup] | NoAnswer] = {}

    def groups(self, clusters: str = "") -> list[cluster.NodeGroup]:
        """Return `node_groups`.

        Args:
            clusters: value of --clusters. Slurm chooses among several, so that nothing is known about the nodes.

        Raises:
            NoAnswer: the controller does not answer.
        """
        if clusters not in self._found:
            try:
                self._found[clusters] = node_groups(here(os.environ, clusters)) if is_single(clusters) else []
            except NoAnswer as error:
                self._found[clusters] = error
        found = self._found[clusters]
        if isinstance(found, NoAnswer):
            raise found
        return found


def node_address(name: str) -> str | None:
    """Return the address by which Slurm reaches a node (NodeAddr), or None if it cannot be asked."""
    try:
        text = _output(["scontrol", "show", "node", "-o", name], time.monotonic() + LOOK_S, here(os.environ, ""))
    except NoAnswer:
        return None
    match = re.search(r"^NodeName=\S+ .*?\bNodeAddr=(\S+)", text, re.MULTILINE)
    return match[1] if match else None


def partitions(place: Place | None = None) -> list[cluster.Partition]:
    """Return every partition of the cluster, including hidden ones.

    Raises:
        NoAnswer: Slurm cannot be reached.
    """
    return cluster.read_partitions(_checked_output(["scontrol", "show", "partition", "-o", "-a"], place))


def runs_jobs_here() -> bool:
    """Return whether this machine is a node, on which slurmd runs; false if Slurm does not answer."""
    try:
        result = _run(["scontrol", "show", "slurmd"], time.monotonic() + LOOK_S)
    except NoAnswer:
        return False
    return result is not None and result.returncode == 0


def configuration(place: Place | None = None) -> tuple[dict[str, str], dict[str, bool]]:
    """Return Slurm's settings and its controllers: host -> whether it is up.

    Raises:
        NoAnswer: Slurm cannot be reached.
    """
    text = _checked_output(["scontrol", "show", "config"], place)
    return cluster.read_config(text), cluster.read_controllers(text)


def max_array_size(place: Place) -> int:
    """Most tasks that an array may have on a cluster; Slurm's default if it cannot be asked (slurm.conf(5))."""
    try:
        config, _ = configuration(place) if available() else ({}, {})
    except NoAnswer:
        config = {}
    return int(config.get("MaxArraySize", 1001)) - 1


def associations(name: str) -> list[cluster.Association]:
    """Return this user's accounts on a cluster.

    Raises:
        NoAnswer: the accounting database cannot be reached.
    """
    try:
        user = f"user={pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:
        raise NoAnswer(
            f"user id {os.getuid()} has no name on this machine, and accounting lists accounts by name"
        ) from None
    show = ["sacctmgr", "-nP", "show", "assoc", user, f"format={cluster.ASSOCIATION_COLUMNS}"]
    return cluster.read_associations(_checked_output(show), name)


def has_pyxis() -> bool:
    """Return whether srun runs containers with the pyxis plugin, which adds options to its help.

    Raises:
        NoAnswer: srun takes too long.
    """
    return "--container-image" in _output(["srun", "--help"], place=here(os.environ, ""))


_SACCT = ["sacct", "-X", "-n", "-P", "--duplicates", "-o", "JobID,State,ExitCode,NodeList,Reason", "-j"]
_SQUEUE = [
    "squeue",
    "-h",
    "-t",
    "all",
    "-r",
    "-O",
    "JobArrayID:40|,State:30|,NodeList:400|,Reason:100|,StartTime:30|",
    "-j",
]
_SQUEUE_LOGS = ["squeue", "-h", "--me", "-t", "all", "-O", "JobID:40|,StdOut:4096|"]


_SILENT_ACCOUNTS = "Slurm does not answer: the controller has forgotten the job, and sacct took too long"


def _recorded(job_ids: str, within_s: float, place: Place | None) -> str | None:
    """Return the output of sacct; None if the database needs more than half of the time."""
    try:
        return _output([*_SACCT, job_ids], time.monotonic() + within_s / 2, place)
    except NoAnswer:
        return None


def _scontrol(job_id: str, deadline: float, place: Place | None) -> JobState | None:
    return read_scontrol(_asked(["scontrol", "show", "job", "-o", job_id], deadline, place))


def _is_queued(job_id: str, deadline: float, place: Place | None) -> bool:
    text = _asked(["squeue", "-h", "-o", "%i", "-j", job_id], deadline, place)
    return re.search(r"^\d", text, re.MULTILINE) is not None


def _asked(argv: list[str], deadline: float, place: Place | None) -> str:
    """Return what the controller answers about jobs; an empty text if it has no record of them.

    Raises:
        NoAnswer: it does not answer.
    """
    result = _run(argv, deadline, place)
    if result is None or (result.returncode and "Invalid job id" not in result.stderr):
        raise NoAnswer(f"Slurm does not answer: {_message(result)}")
    return result.stdout


def _output(argv: list[str], deadline: float | None = None, place: Place | None = None) -> str:
    """Return the standard output, or an empty text if the program is missing or fails."""
    result = _run(argv, deadline, place)
    return result.stdout if result is not None and result.returncode == 0 else ""


def _checked_output(argv: list[str], place: Place | None = None) -> str:
    result = _run(argv, place=place)
    if result is None or result.returncode:
        raise NoAnswer(f"{' '.join(argv[:3])}: {_message(result)}")
    return result.stdout


def _run(
    argv: list[str], deadline: float | None = None, place: Place | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run a program of Slurm until a deadline (`time.monotonic()`). Returns None if there is no such program."""
    place = place or here(os.environ)
    command = [argv[0], *place.words(argv[0]), *argv[1:]]
    timeout = TIMEOUT_S if deadline is None else max(_LEAST_S, deadline - time.monotonic())
    try:
        with doing(f"waiting for Slurm ({argv[0]})"):
            return subprocess.run(
                command, env=place.environment(os.environ), capture_output=True, text=True, timeout=timeout, check=False
            )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"Slurm does not answer: {argv[0]} took longer than {timeout:.0f} s") from error


def _message(result: subprocess.CompletedProcess[str] | None) -> str:
    if result is None:
        return "its programs are not on PATH"
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {result.returncode}"
