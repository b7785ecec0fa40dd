"""The memory of a cluster's GPUs as an earlier run recorded it, for a site profile that does not state it."""

from __future__ import annotations

from typing import NamedTuple

from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.config.tree import read_options
from hpc_rl.host.usage import read_spans
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.folders import newest_runs


class RecordedGpus(NamedTuple):
    """GPUs that a run had."""

    run: str
    gigabytes: float
    """Memory of the smallest of them, in 10^9 bytes."""


def gpus_like(slurm: SlurmConfig) -> RecordedGpus | None:
    """Return the GPUs that the newest run had that requested the same partition and type; None if there is none."""
    for run in newest_runs():
        gigabytes = _recorded(run)
        if gigabytes is None:
            continue
        options = read_options(run.config)
        if (options.get("slurm.partition"), options.get("slurm.gpu_type")) == (slurm.partition, slurm.gpu_type):
            return RecordedGpus(run.name, gigabytes)
    return None


def _recorded(run: RunDir) -> float | None:
    """Return the memory of the smallest GPU of a run's newest attempt that recorded one; None without GPUs."""
    for attempt in reversed(run.attempts()):
        samples = [node.samples[-1] for node in read_spans(attempt) if node.samples]
        if sizes := [gpu.total_gb for sample in samples for gpu in sample.gpus]:
            return min(sizes)
    return None
