"""The starts of a job as Slurm's accounting records them. Pure functions that parse the output of sacct."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from hpc_rl.slurm.states import exit_code_of, plain_state

COLUMNS = "JobIDRaw,State,ExitCode,Start,End,NNodes"


@dataclass(frozen=True)
class JobStart:
    """One start of a job."""

    job_id: str
    state: str
    exit_code: int | None
    began: float
    """Unix time in seconds, like `ended`."""
    ended: float | None
    """None while the job runs."""
    nodes: int

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return (self.ended or self.began) - self.began


def read_starts(text: str) -> list[JobStart]:
    """Parse the output of `sacct -X -n -P --duplicates -o COLUMNS`. Returns the starts, oldest first.

    Jobs that never started are left out. Times are in this machine's time zone (sacct(1), SLURM_TIME_FORMAT).
    """
    starts = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != len(COLUMNS.split(",")) or (began := _time(fields[3])) is None:
            continue
        starts.append(
            JobStart(
                job_id=fields[0],
                state=plain_state(fields[1]),
                exit_code=exit_code_of(fields[2]),
                began=began,
                ended=_time(fields[4]),
                nodes=int(fields[5]) if fields[5].isdigit() else 0,
            )
        )
    return sorted(starts, key=lambda start: start.began)


def _time(text: str) -> float | None:
    """Parse `2025-01-31T12:00:00`. Returns None for the words Unknown and None."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
