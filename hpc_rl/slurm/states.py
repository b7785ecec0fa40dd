"""Job states out of the text of sacct, squeue and scontrol. Pure functions."""

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
"""States that a job does not leave by itself (squeue's manual page, JOB STATE CODES)."""


@dataclass(frozen=True)
class JobState:
    """What Slurm knows of one job."""

    state: str
    """Long name in capitals: PENDING, RUNNING, COMPLETED, ... or UNKNOWN."""
    nodes: str = ""
    """Hostlist; empty while pending."""
    reason: str = ""
    """Why it waits, or why it failed, in Slurm's words."""
    exit_code: int | None = None
    """As a shell would see it: 128 + n for a death by signal n. None before the end."""
    stdout: str = ""
    """Path of the job's log, where Slurm tells it."""
    expected_start: str = ""
    """Slurm's estimate for a pending job, ISO 8601 in the controller's time zone; empty if it has none."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def read_sacct(text: str, job_id: str) -> JobState | None:
    """Output of `sacct -X -n -P --duplicates -o JobID,State,ExitCode,NodeList,Reason`; the job's last line counts."""
    return sacct_states(text).get(job_id)


def sacct_states(text: str) -> dict[str, JobState]:
    """The same for every job in it. Tasks of an array that have not started share a line, `12_[3-6%2]`."""
    found: dict[str, JobState] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == 5:
            state = plain_state(fields[1])
            exit_code = exit_code_of(fields[2]) if state in ENDED else None
            one = JobState(state, _nodes(fields[3]), _reason(fields[4]), exit_code)
            found |= dict.fromkeys(_array_tasks(fields[0]), one)
    return found


def read_squeue(text: str, job_id: str) -> JobState | None:
    """Output of `squeue -h -t all -O JobArrayID:|,State:|,NodeList:|,Reason:|,StartTime:|`.

    squeue does not tell an exit code, so an ended job is left to `scontrol`, whose answer has one.
    """
    return squeue_states(text).get(job_id)


def squeue_states(text: str) -> dict[str, JobState]:
    """The same for every job in it; with -r each task of an array has a line."""
    found = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) >= 4:
            state = plain_state(fields[1])
            start = _time(fields[4]) if state == "PENDING" and len(fields) > 4 else ""
            found[fields[0]] = JobState(state, _nodes(fields[2]), _reason(fields[3]), expected_start=start)
    return found


def newer(recorded: JobState | None, queued: JobState | None) -> JobState | None:
    """What accounting and the controller say of one job: accounting lags behind, but knows how it ended."""
    if recorded and recorded.ended and (queued is None or queued.ended):
        return recorded
    return queued or recorded


def read_scontrol(text: str) -> JobState | None:
    """Output of `scontrol show job -o ID`, which Slurm keeps for MinJobAge (300 s) after the end."""
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
    """Value of `export VARIABLE=...` in a job script, as bash would read it; None without such a line.

    Raises:
        ValueError: only bash could tell the value (a command substitution, or a variable that is not set here).
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
    """`CANCELLED by 1000` and `RUNNING+` are the state and something about it."""
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
    """Slurm's `code:signal`."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        return None
    return 128 + int(match[2]) if int(match[2]) else int(match[1])
