"""Job states. Pure functions that parse the output of sacct, squeue and scontrol, and the end that a job recorded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_rl.run_dir import UNFINISHED, RunDir
from hpc_rl.slurm.allocation import expand_hostlist

NOT_STARTED = "Slurm could not start the job's script: usually its log or its folder cannot be opened on the node"
NEVER = {
    "PartitionNodeLimit": "it requests more or fewer nodes than its partition allows: change --nodes or --partition",
    "PartitionTimeLimit": "its walltime exceeds the limit of its partition: lower --time",
    "BadConstraints": "no node can satisfy what it requests: change its nodes, GPUs, memory or constraint",
    "DependencyNeverSatisfied": "a job that it waits for did not complete: requeue that one, and submit this one again",
    "JobHeldUser": "it is held: scontrol release JOB",
    "JobHeldAdmin": "an administrator holds it: ask them",
    "AccountNotAllowed": "its account may not use the partition: change --account or --partition",
    "InvalidAccount": "its account does not exist: change --account",
    "QOSNotAllowed": "its quality of service is not allowed in the partition: change --qos or --partition",
    "InvalidQOS": "its quality of service does not exist: change --qos",
    "PartitionInactive": "its partition is inactive: change --partition",
    "ReservationDeleted": "its reservation does not exist any more: leave it out",
    "launch failed requeued held": "it failed to start and is held: look at its nodes, then scontrol release JOB",
    "JobHoldMaxRequeue": "it was queued again too often and is held: scontrol release JOB",
}
"""Reasons of waiting jobs that time does not change -> what to do (squeue(1), JOB REASON CODES)."""
_PER_JOB = re.compile(r"(Assoc|QOS|QoS)(Max\w+PerJob|MaxWall\w|Min\w)")
"""Limits of a single job, which it exceeds however long it waits."""

ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""Final states (squeue's manual page, JOB STATE CODES)."""


@dataclass(frozen=True)
class JobState:
    """The state of one job as Slurm reports it."""

    state: str
    """Long name in capitals, such as PENDING, RUNNING or COMPLETED; or UNKNOWN."""
    nodes: str = ""
    """Hostlist; empty while the job is pending."""
    reason: str = ""
    """Slurm's reason why the job waits or has failed."""
    exit_code: int | None = None
    """As a shell shows it: 128 + n if signal n ended the job. None before the end."""
    stdout: str = ""
    """Path of the job's log, if Slurm reports it."""
    cancelled_by: int | None = None
    """Id of the user who cancelled the job, if accounting reports it."""
    expected_start: str = ""
    """Slurm's estimate for a pending job, ISO 8601 in the controller's time zone; empty if it has none."""

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state in ENDED


def read_sacct(text: str, job_id: str) -> JobState | None:
    """Parse `sacct -X -n -P --duplicates -o JobID,State,ExitCode,NodeList,Reason`. The job's last line counts."""
    return sacct_states(text).get(job_id)


def sacct_states(text: str) -> dict[str, JobState]:
    """Parse the same output for all jobs. Tasks of an array that have not started share a line, `12_[3-6%2]`."""
    found: dict[str, JobState] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == 5:
            state = plain_state(fields[1])
            exit_code = exit_code_of(fields[2]) if state in ENDED else None
            by = re.fullmatch(r"CANCELLED by (\d+)", fields[1])
            user = int(by[1]) if by else None
            one = JobState(state, _nodes(fields[3]), _reason(fields[4], fields[2]), exit_code, cancelled_by=user)
            found |= dict.fromkeys(_array_tasks(fields[0]), one)
    return found


def read_squeue(text: str, job_id: str) -> JobState | None:
    """Parse `squeue -h -t all -O JobArrayID:|,State:|,NodeList:|,Reason:|,StartTime:|`.

    squeue does not report exit codes; `scontrol` does.
    """
    return squeue_states(text).get(job_id)


def squeue_states(text: str) -> dict[str, JobState]:
    """Parse the same output for all jobs. With -r each task of an array has its own line."""
    found = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) >= 4:
            state = plain_state(fields[1])
            start = _time(fields[4]) if state == "PENDING" and len(fields) > 4 else ""
            found[fields[0]] = JobState(state, _nodes(fields[2]), _reason(fields[3]), expected_start=start)
    return found


def newer(recorded: JobState | None, queued: JobState | None) -> JobState | None:
    """Combine the states of accounting and the controller. Accounting lags behind, but has the exit code."""
    if recorded and recorded.ended and (queued is None or queued.ended):
        return recorded
    return queued or recorded


def read_scontrol(text: str) -> JobState | None:
    """Parse `scontrol show job -o ID`, which Slurm keeps for MinJobAge (300 s) after the end."""
    keys = list(re.finditer(r"(?:^|\s)([A-Za-z/:]+)=", text))
    ends = [key.start() for key in keys[1:]] + [len(text)]
    fields = {key[1]: text[key.end() : end].strip() for key, end in zip(keys, ends, strict=False)}
    if "JobState" not in fields:
        return None
    state = plain_state(fields["JobState"])
    exit_code = exit_code_of(fields.get("ExitCode", "")) if state in ENDED else None
    return JobState(
        state,
        _nodes(fields.get("NodeList", "")),
        _reason(fields.get("Reason", ""), fields.get("ExitCode", "")),
        exit_code,
        fields.get("StdOut", ""),
    )


def run_dir_of_script(text: str, variable: str, environ: Mapping[str, str]) -> str | None:
    """Return the value of `export VARIABLE=...` in a job script as bash would read it, or None without such a line.

    Raises:
        ValueError: only bash could determine the value (a command substitution, or a variable that is not set here).
    """
    for line in text.splitlines():
        match = re.match(rf"\s*(?:export\s+)?{variable}=(\S.{{0,9999}})", line)
        if not match:
            continue
        if match[1].startswith("$'"):
            return match[1][2:].rpartition("'")[0].encode().decode("unicode_escape")
        words = shlex.split(match[1], comments=True)
        if not words:
            return None
        if match[1].startswith("'"):
            return words[0]
        value = re.sub(r"\$\{?(\w+)\}?", lambda name: environ.get(name[1], name[0]), words[0])
        if re.search(r"[$`]", value):
            raise ValueError(f"{variable}={match[1]}")
        return value
    return None


def never_starts(reason: str) -> str | None:
    """Return why a job with this reason waits forever, and what to do; None if it may start."""
    if reason in NEVER:
        return NEVER[reason]
    if _PER_JOB.match(reason):
        return "it exceeds a limit for single jobs of your account or quality of service: request less, or change --qos"
    return None


def plain_state(state: str) -> str:
    """Remove details from a state: `CANCELLED by 1000` -> CANCELLED, `RUNNING+` -> RUNNING."""
    words = state.split()
    return words[0].rstrip("+") if words else "UNKNOWN"


def _array_tasks(job_id: str) -> tuple[str, ...]:
    if re.fullmatch(r"\d+_\[[\d,-]+(%\d+)?\]", job_id):
        return expand_hostlist(re.sub(r"%\d+", "", job_id))
    return (job_id,)


def _nodes(text: str) -> str:
    return "" if text in ("(null)", "None assigned", "None") else text


def _time(text: str) -> str:
    return text if re.match(r"\d{4}-\d\d-\d\dT", text) else ""


def _reason(text: str, code: str = "") -> str:
    if code.endswith(":53"):  # Slurm then has the reason RaisedSignal:53(Real-time_signal_19)
        return NOT_STARTED
    return "" if text in ("None", "(null)") else text


def exit_code_of(text: str) -> int | None:
    """Parse Slurm's `code:signal`. A number that is no signal is one of Slurm's own: the job failed with 1."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        return None
    number = int(match[2])
    return int(match[1]) if not number else 128 + number if _is_signal(number) else 1


def _is_signal(number: int) -> bool:
    return number < 32  # Slurm uses real-time signals and higher numbers for its own failures: 53, 125


def end_of(run: RunDir) -> str | None:
    """Return the state in which a run has ended; None if it goes on, waits in the queue or has not started. Slurm is
    not asked."""
    own = run.read_status()
    state: str | None = own.get("state")
    is_newest = own.get("job_id") == run.read_job().get("job_id")
    return state if is_newest and state not in (None, *UNFINISHED) and run.holder() is None else None
