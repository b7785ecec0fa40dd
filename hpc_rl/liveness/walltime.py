"""The end of the job's walltime, as its processes know it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

ENV_JOB_END = "HPC_RL_JOB_END"
"""Unix time at which the walltime ends; set by the job script, and empty if Slurm did not answer."""
RESERVE_S = 30
"""Time between the end of a checkpoint and the end of the walltime, in which the processes exit."""
EARLY_S = 90
"""Slurm may send its warning a minute early (sbatch(1), --signal); a warning before that is a preemption."""


WalltimeEnd = Callable[[], float | None]
"""Returns the Unix time at which the job's walltime ends, or None if it is not known or not limited."""


def unlimited() -> None:
    """Return that no end of the walltime is known."""


def job_end(environ: Mapping[str, str], moved: Path) -> WalltimeEnd:
    """Return what tells when the job's walltime ends.

    Args:
        moved: the file to which the job script writes a later end: Slurm has moved it, because the job was suspended.
    """

    def end() -> float | None:
        text = environ.get(ENV_JOB_END, "")
        with contextlib.suppress(OSError):
            text = moved.read_text()
        return float(text) if text.strip().isdecimal() else None

    return end
