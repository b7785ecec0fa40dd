"""The memory and the model of a cluster's GPUs, from the site profile or from the name that Slurm has for them."""

from __future__ import annotations

import re

from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.formats.gpu_models import GpuModel, named_gb, requested, stated_gb

USABLE = 0.95
"""Assumed: the part of a GPU's memory that tensors can use. CUDA's own memory and gaps between tensors take the
rest."""
TIGHT = 0.9
"""A job that needs more than this part of the usable memory may fail on longer samples or with another version of
torch."""
_SLICE = re.compile(r"\dg\.\d+gb")
"""A part of a GPU (MIG), which has a part of its speed."""


def gpu_bytes(slurm: SlurmConfig) -> float | None:
    """Return the memory of one GPU of a job, in bytes; None if it is unknown.

    A size in the name of the requested GPUs comes first, because a profile may describe others. A model comes last.
    """
    name = slurm.gpu_type or ""
    gigabytes = stated_gb(name) or slurm.node.gpu_gb or named_gb(name)
    return gigabytes * 1e9 if gigabytes else None


def gpu_model(slurm: SlurmConfig) -> GpuModel | None:
    """Return the model of the GPUs that a job requests; None if their name leaves it open, or names a part of one."""
    name = (slurm.gpu_type or "").lower()
    return None if _SLICE.search(name) else requested(name)
