"""The memory of a cluster's GPUs as an earlier run recorded it, for a site profile that does not state it."""

from __future__ import annotations

from typing import NamedTuple

from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.config.tree import read_options
from hpc_rl.formats.usage import read_spans
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.folders import newest_runs

_SAME = ("slurm.partition", "slurm.gpu_type", "slurm.constraint")
"""Settings on which it depends which GPUs a job gets."""


class RecordedGpus(NamedTuple):
    """GPUs that a run had."""

    run: RunDir
    gigabytes: float
    """Memory of the smallest of them, in 10^9 bytes."""


def gpus_like(slurm: SlurmConfig) -> RecordedGpus | None:
    """Return the GPUs of the newest job that requested the same partition, type and features of nodes.

    Returns:
        None if there is none, or if the settings name neither partition nor type, so that they fit other clusters too.
    """
    asked = (slurm.partition, slurm.gpu_type, slurm.constraint)
    if slurm.partition is None and slurm.gpu_type is None:
        return None
    for run in newest_runs():
        if "pid" in run.read_job() or (gigabytes := _recorded(run)) is None:  # a pid: it ran on a login node
            continue
        options = read_options(run.config)
        if tuple(options.get(key) for key in _SAME) == asked:
            return RecordedGpus(run, gigabytes)
    return None


def _recorded(run: RunDir) -> float | None:
    """Return the memory of the smallest GPU of a run's newest attempt that recorded one; None without GPUs."""
    for attempt in reversed(run.attempts()):
        samples = [node.samples[-1] for node in read_spans(attempt) if node.samples]
        if sizes := [gpu.total_gb for sample in samples for gpu in sample.gpus]:
            return min(sizes)
    return None
