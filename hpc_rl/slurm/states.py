"""Job states. Pure functions that parse the output of sacct, squeue and scontrol."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_rl.slurm.allocation import expand_hostlist

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
            one = JobState(state, _nodes(fields[3]), _reason(fields[4]), exit_code, cancelled_by=user)
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
    fields = dict(re.findall(r"(?:^|\s)(JobState|NodeList|Reason|ExitCode|StdOut)=(.*?)(?=\s+[A-Za-z/:]+=|\s*$)", text))
    if "JobState" not in fields:
        return None
    state = plain_state(fields["JobState"])
    exit_code = exit_code_of(fields.get("ExitCode", "")) if state in ENDED else None
    return JobState(
        state,
        _nodes(fields.get("NodeList", "")),
        _reason(fields.get("Reason", "")),
        exit_code,
        fields.get("StdOut", ""),
    )


def run_dir_of_script(text: str, variable: str, environ: Mapping[str, str]) -> str | None:
    """Return the value of `export VARIABLE=...` in a job script as bash would read it, or None without such a line.

    Raises:
        ValueError: only bash could determine the value (a command substitution, or a variable that is not set here).
    """
    for line in text.splitlines():
        match = re.match(rf"\s*(?:export\s+)?{variable}=(\S.*)", line)
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


def _reason(text: str) -> str:
    return "" if text in ("None", "(null)") else text


def exit_code_of(text: str) -> int | None:
    """Parse Slurm's `code:signal`."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        return None
    return 128 + int(match[2]) if int(match[2]) else int(match[1])
