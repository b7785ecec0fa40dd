"""Scores of a run's checkpoints, which jobs beside it write into its directory (`hpc-rl lend RUN --role eval`).

    metrics-eval-3f0c11d2-math-eval-1.jsonl
    {"step": 20, "saved": 1732840000000000000, "time": 1732840031.2, "eval/score": 0.25, "eval/test/score": 0.25, ...}

The first part of the name stands for the data, the sampling and the reward, the second one for the job, so that each
file has one writer, and metrics.jsonl no other than the run. `saved` is when the checkpoint was written, in ns. The
lines of all files are read in its order. Each discards those of later steps before it, as in metrics.jsonl.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_rl.system.files import LineFile, last_lines_of, open_regular
from hpc_rl.tracking.metrics import Record, parse_line

_OURS = "eval/"
_MOST_BYTES = 2**24
"""At the end of a file that are read."""


def points_file(folder: Path, evaluation: str, job: str) -> LineFile:
    """Return the file of a job's scores.

    Args:
        folder: the directory of the run that saves the checkpoints.
        evaluation: stands for what is scored and how.
        job: name of the run that scores.
    """
    return LineFile(folder / f"metrics-eval-{evaluation}-{job}.jsonl")


def add_point(file: LineFile, step: int, saved: int, metrics: Mapping[str, float]) -> None:
    """Append the scores of a checkpoint; they are in the file when this returns, unless the disk is full.

    Args:
        saved: when the checkpoint was written, in ns.
    """
    record: Record = {"step": step, "saved": saved, "time": round(time.time(), 3)}
    record |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    file.write(json.dumps(record, allow_nan=False))


def scored(folder: Path, evaluation: str) -> set[tuple[int, int]]:
    """Return step and time of the checkpoints of a run that an evaluation has scored, in any job."""
    return {(record["step"], _saved(record)) for record in _read(folder, evaluation)}


def read_points(folder: Path) -> dict[int, Record]:
    """Return the scores of a run's checkpoints by step."""
    found: dict[tuple[int, int], Record] = {}
    for record in sorted(_read(folder, "*"), key=_saved):
        key = record["step"], _saved(record)
        found = {other: values for other, values in found.items() if other[0] < key[0] or other == key}
        found[key] = {**found.get(key, {}), **{name: record[name] for name in record if name.startswith(_OURS)}}
    return {step: values for (step, _), values in found.items()}


def with_points(records: Sequence[Record], folder: Path) -> list[Record]:
    """Return the records of a run, in order, with the scores of its checkpoints.

    Scores of steps after the last record are left out: the run has resumed before them.
    """
    steps, found = [record["step"] for record in records], {record["step"]: record for record in records}
    for step, values in read_points(folder).items():
        before = bisect_right(steps, step)
        if before and step <= steps[-1]:
            near = records[before - 1]  # of a long run, not all steps are read
            of_all = {"step": step, "total_steps": near["total_steps"], "time": near["time"]}
            found[step] = {**found.get(step, of_all), **values}
    return [found[step] for step in sorted(found)]


def _saved(record: Record) -> int:
    return record.get("saved") or 0


def _read(folder: Path, evaluation: str) -> list[Record]:
    found: list[Record] = []
    for path in sorted(folder.glob(f"metrics-eval-{evaluation}-*.jsonl")):
        with suppress(OSError), open_regular(path) as file:
            found += filter(None, map(parse_line, last_lines_of(file, _MOST_BYTES)))
    return found
