"""What earlier runs recorded: their speed, and the memory of their GPUs. New jobs are planned by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hpc_rl.config.slurm import SlurmConfig
from hpc_rl.config.tree import read_options
from hpc_rl.formats.usage import read_spans
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.folders import newest_runs
from hpc_rl.tracking.metrics import MOST_STEPS, Record, read_thinned
from hpc_rl.tracking.planned import Expected, read_expected

SAME_SIZE = 0.1
"""Largest difference of two numbers of parameters, as a part of the larger one, that counts as the same size."""
_FIRST_STEPS = 1
"""Steps that are left out: kernels are compiled and connections are made then."""
_SAME = ("slurm.partition", "slurm.gpu_type", "slurm.constraint")
"""Settings on which it depends which GPUs a job gets."""


@dataclass(frozen=True)
class RunSpeed:
    """What a run recorded, as medians over its steps."""

    run: str
    throughput: float
    """Tokens per second and GPU, in whole steps."""
    tokens: float
    """Tokens of a sample, or of a response with its prompt."""
    peak_gb: float
    """Most memory of the training processes on a GPU, in 10^9 bytes."""
    planned_gb: float
    """The same, as its plan expected it."""

    def step_seconds(self, items: int, longest: int, gpus: int) -> float:
        """Return the time of a step with samples as long as in this run.

        Args:
            longest: the largest number of tokens that a sample may have.
        """
        return items * min(self.tokens, longest) / (self.throughput * gpus)


def newest_like(kind: str, gpu: str, parameters: int) -> RunSpeed | None:
    """Return what the newest run of a kind recorded, on the same kind of GPUs and with a model of the same size.

    The runs are those of all projects of this user.

    Returns:
        None if there is no such run that has recorded two steps.
    """
    for run in newest_runs():
        expected = read_expected(run)
        job = run.read_job()
        if expected is None or job.get("kind") != kind or not _is_like(expected, gpu, parameters):
            continue
        if (found := _measured(run, expected, _submitted(job))) is not None:
            return found
    return None


def _is_like(expected: Expected, gpu: str, parameters: int) -> bool:
    difference = abs(expected.parameters - parameters)
    return expected.gpu == gpu and difference <= SAME_SIZE * max(expected.parameters, parameters)


def _submitted(job: Mapping[str, Any]) -> float:
    """Return the Unix time of the last submission of a run; 0 if it is not recorded. Earlier steps may have had other
    GPUs."""
    try:
        return datetime.fromisoformat(str(job["submitted"])).timestamp()
    except (KeyError, ValueError):
        return 0.0


def _measured(run: RunDir, expected: Expected, submitted: float) -> RunSpeed | None:
    timed = [record for record in read_thinned(run.metrics, MOST_STEPS).records if record.get("perf/tokens_per_s")]
    records = [record for record in timed if record.get("time", 0.0) >= submitted][_FIRST_STEPS:]
    if not records or not expected.items or not expected.gpus:
        return None
    peaks = [record["perf/max_memory_gb"] for record in records if record.get("perf/max_memory_gb") is not None]
    return RunSpeed(
        run=run.name,
        throughput=median(record["perf/tokens_per_s"] for record in records) / expected.gpus,
        tokens=median(record["perf/tokens_per_s"] / _items_per_s(record, expected.items) for record in records),
        peak_gb=max(peaks, default=0.0),
        planned_gb=expected.training_gb,
    )


def _items_per_s(record: Record, items: int) -> float:
    """Return the samples or responses per second. Blocks of generation have different sizes."""
    return float(record.get("perf/responses_per_s") or items / record["perf/time_per_step"])


class GpuMemory(NamedTuple):
    """The memory of one GPU of a job."""

    bytes: float
    run: Path | None = None
    """The earlier run that recorded it; None if the settings state it."""

    @property
    def source(self) -> str:
        """What states it, in words."""
        if self.run is None:
            return "slurm.node.gpu_gb or slurm.gpu_type"
        return f"the run {self.run}; if it is wrong, set slurm.node.gpu_gb"


def gpus_like(slurm: SlurmConfig) -> GpuMemory | None:
    """Return the GPUs of the newest job that requested the same partition, type and features of nodes.

    Returns:
        None if there is none, or if the settings name neither partition nor type, so that they fit other clusters too.
    """
    asked = (slurm.partition, slurm.gpu_type, slurm.constraint)
    if slurm.partition is None and slurm.gpu_type is None:
        return None
    for run in newest_runs():
        if "pid" in run.read_job() or (gigabytes := _recorded_gb(run)) is None:  # a pid: it ran on a login node
            continue
        options = read_options(run.latest_settings)
        if tuple(options.get(key) for key in _SAME) == asked:
            return GpuMemory(gigabytes * 1e9, run.path)
    return None


def _recorded_gb(run: RunDir) -> float | None:
    """Return the memory of the smallest GPU of a run's newest attempt that recorded one; None without GPUs."""
    for attempt in reversed(run.attempts()):
        samples = [node.samples[-1] for node in read_spans(attempt) if node.samples]
        if sizes := [gpu.total_gb for sample in samples for gpu in sample.gpus]:
            return min(sizes)
    return None
