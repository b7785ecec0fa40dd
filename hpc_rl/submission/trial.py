"""Whether sbatch accepts jobs with a proposed profile. Nothing is submitted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from hpc_rl.config.compose import compose
from hpc_rl.config.tree import flat
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.folders import ROOT
from hpc_rl.slurm.commands import NoAnswer
from hpc_rl.submission.executor import refusal
from hpc_rl.submission.job import Job
from hpc_rl.submission.script.render import render

TRIALS_S = 180
"""Deadline for all trials of one search."""


def limited_trials() -> Callable[[str], str | None]:
    """Return `profile_refusal` with a deadline for all calls together; after it, they raise NoAnswer."""
    deadline = time.monotonic() + TRIALS_S

    def refuses(profile: str) -> str | None:
        if time.monotonic() > deadline:
            raise NoAnswer(f"sbatch --test-only accepted no job within {TRIALS_S} s")
        return profile_refusal(profile)

    return refuses


def profile_refusal(profile: str) -> str | None:
    """Return why sbatch refuses a job on one GPU, or on all GPUs of a node, with a profile; None if it accepts both.

    Args:
        profile: text of a profile whose partition, GPUs and node size are set.

    Raises:
        NoAnswer: sbatch does not answer.
    """
    values = flat(yaml.safe_load(profile))
    gpus = values.get("slurm.node.gpus", 1)
    device = "cpu" if values.get("trainer.device") == "cpu" else "cuda"
    for count in sorted({1, gpus}):
        given = {"trainer.device": device, "trainer.n_gpus_per_node": count, "slurm.job_name": "site-detect"}
        config = compose("torchrun", settings=given, site=values)
        job = Job("torchrun", config, RunDir((ROOT / "site-detect").absolute()), Path.cwd(), (sys.executable,))
        if message := refusal(render(job)):
            return message
    return None
