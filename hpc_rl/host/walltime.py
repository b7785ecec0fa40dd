"""The end of the job's walltime, as its processes know it."""

from __future__ import annotations

from collections.abc import Mapping

ENV_JOB_END = "HPC_RL_JOB_END"
"""Unix time at which the walltime ends; set by the job script, and empty if Slurm did not answer."""
RESERVE_S = 30
"""Time between the end of a checkpoint and the end of the walltime, in which the processes exit."""
EARLY_S = 90
"""Slurm may send its warning a minute early (sbatch(1), --signal); a warning before that is a preemption."""


def job_end(environ: Mapping[str, str]) -> float | None:
    """Return the Unix time at which the job's walltime ends, or None if it is not known or not limited."""
    text = environ.get(ENV_JOB_END, "").strip()
    return float(text) if text.isdecimal() else None
