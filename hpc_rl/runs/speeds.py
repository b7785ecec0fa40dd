"""The speed of earlier runs, from which the time of a new job is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from hpc_rl.run_dir import RunDir
from hpc_rl.runs.folders import newest_runs
from hpc_rl.tracking.metrics import MOST_STEPS, Record, read_thinned
from hpc_rl.tracking.planned import Expected, read_expected

SAME_SIZE = 0.1
"""Largest difference of two numbers of parameters, as a part of the larger one, that counts as the same size."""
_FIRST_STEPS = 1
"""Steps that are left out: kernels are compiled and connections are made then."""


@dataclass(frozen=True)
class Measured:
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


def newest_like(kind: str, gpu: str, parameters: int) -> Measured | None:
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


def _measured(run: RunDir, expected: Expected, submitted: float) -> Measured | None:
    timed = [record for record in read_thinned(run.metrics, MOST_STEPS).records if record.get("perf/tokens_per_s")]
    records = [record for record in timed if record.get("time", 0.0) >= submitted][_FIRST_STEPS:]
    if not records or not expected.items or not expected.gpus:
        return None
    peaks = [record["perf/max_memory_gb"] for record in records if record.get("perf/max_memory_gb") is not None]
    return Measured(
        run=run.name,
        throughput=median(record["perf/tokens_per_s"] for record in records) / expected.gpus,
        tokens=median(record["perf/tokens_per_s"] / _items_per_s(record, expected.items) for record in records),
        peak_gb=max(peaks, default=0.0),
        planned_gb=expected.training_gb,
    )


def _items_per_s(record: Record, items: int) -> float:
    """Return the samples or responses per second. Blocks of generation have different sizes."""
    return float(record.get("perf/responses_per_s") or items / record["perf/time_per_step"])
