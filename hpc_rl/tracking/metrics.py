"""metrics.jsonl: the measurements of a run, one JSON object per line, written at each step and readable at any time.

Keys of a line: `step`, `total_steps`, `time` (unix seconds), and metrics by group:

    train/loss  train/lr  train/grad_norm  train/epoch  ...
    val/loss
    perf/tokens_per_s (all ranks)  perf/throughput (one rank)  perf/mfu (0 to 1)  perf/max_memory_gb  perf/eta_s
    critic/score/mean  actor/entropy  val/score  response_length/mean  ... (docs/rl.md)
    timing_s/step, and the phases of a step: timing_s/<phase>

Several lines may belong to one step (training, then validation). A resumed run appends to the same file: a line
discards all lines of later steps before it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.host.files import LineFile

Record = dict[str, Any]


class MetricsFile:
    """Appends to metrics.jsonl; a line is in the file when `write` returns, unless the disk is full; see LineFile."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path)

    def write(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> Record:
        """Append one line; NaN and infinities become null, which JSON can hold."""
        record: Record = {"step": step, "total_steps": total_steps, "time": round(time.time(), 3)}
        record |= {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._lines.write(json.dumps(record, allow_nan=False))
        return record

    def close(self) -> None:
        """Write what could not be written before, if that is possible now."""
        self._lines.flush()


def read_metrics(path: Path) -> list[Record]:
    """Return one record per step, in order; empty if there is no file. Half-written lines are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    records: dict[int, Record] = {}
    for line in lines:
        record = parse_line(line)
        if record is None:
            continue
        step = record["step"]
        while records and next(reversed(records)) > step:  # steps are in order: later ones are at the end
            records.popitem()
        records[step] = {**records.get(step, {}), **record}
    return list(records.values())


def parse_line(line: bytes | str) -> Record | None:
    """Return the record of one line, or None if the line is not a complete record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def has_validation(records: Sequence[Record], step: int) -> bool:
    """Return whether the records contain a validation after this step."""
    return any(record["step"] == step and any(name.startswith("val/") for name in record) for record in records)
