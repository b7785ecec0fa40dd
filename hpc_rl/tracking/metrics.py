"""metrics.jsonl: the measurements of a run, one JSON object per line, written at each step and readable at any time.

Keys of a line: `step`, `total_steps`, `time` (unix seconds), and metrics by group:

    train/loss  train/lr  train/grad_norm  train/epoch  ...
    val/loss
    perf/tokens_per_s (all ranks)  perf/throughput (one rank)  perf/mfu (0 to 1)  perf/max_memory_gb  perf/eta_s
    critic/score/mean  actor/entropy  val/score  response_length/mean  ... (docs/rl-jobs.md)
    timing_s/step, and the phases of a step: timing_s/<phase>

Several lines may belong to one step: what it measured, before it is saved; then validation and times. A resumed run
removes the lines of the steps that it repeats, and appends to the same file. A line discards all lines of later steps
before it.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from hpc_rl.formats.typed_json import is_count, is_number, is_time, object_of, well_typed
from hpc_rl.system.files import LineFile, last_lines_of, open_regular, replacing

Record = dict[str, Any]

MOST_STEPS = 50_000
"""Enough steps of a run for plots and medians: a hundred for each point of a plot."""
_OF_ALL = ("step", "total_steps", "time")
"""Keys of every line."""
_TYPES = {"total_steps": is_count, "time": is_time}
_BEGIN = re.compile(rb'\{"step": (\d{1,18}),')
"""The beginning of the lines that `MetricsFile` writes."""
_VALIDATION = b'"val/'
_MOST_BYTES = 2**30
"""At the end of a file that are read: ten times those of a very long run."""
_TAIL_BYTES = 2**20
"""Much more than the longest line."""


class MetricsFile:
    """Appends to metrics.jsonl; a line is in the file when `write` returns, unless the disk is full; see LineFile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = LineFile(path)
        self._has_written = False

    def write(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> Record:
        """Append one line; NaN and infinities become null, which JSON can hold."""
        record: Record = {"step": step, "total_steps": total_steps, "time": round(time.time(), 3)}
        record |= {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        if not self._has_written:
            _drop_repeated(self._path, record)
            self._has_written = True
        self._lines.write(json.dumps(record, allow_nan=False))
        return record

    def close(self) -> None:
        """Write what could not be written before, if that is possible now."""
        self._lines.flush()


def _drop_repeated(path: Path, first: Record) -> None:
    """Remove the lines of the steps that an attempt repeats, which begins with this record, so that other programs read
    each step once too. If the file cannot be written, they stay: `read_metrics` leaves them out."""
    new = first.keys() - {*_OF_ALL, "perf/eta_s"}

    def is_kept(line: bytes) -> bool:
        record = parse_line(line)
        if record is None:
            return False
        return record["step"] < first["step"] or (record["step"] == first["step"] and not new & record.keys())

    try:
        with path.open("rb") as file:
            if all(map(is_kept, file)):
                return
        with replacing(path) as partial, path.open("rb") as file, partial.open("xb") as kept:
            kept.writelines(line for line in file if is_kept(line))
    except OSError:
        return


def read_metrics(path: Path) -> list[Record]:
    """Return one record per step, in order; empty if there is no file. Half-written lines are left out."""
    return read_thinned(path, None).records


@dataclass(frozen=True)
class ThinnedRecords:
    """The records of some steps of a run, in order."""

    records: list[Record]
    every: int = 1
    """The records are those of step 1 and every so many steps after it, of the last step, and the validations of all
    steps."""


def read_thinned(path: Path, most: int | None) -> ThinnedRecords:
    """Read a file as read_metrics does, but of long runs about `most` steps only, which takes a fraction of the time.

    Args:
        most: steps; None for all.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return ThinnedRecords([])
    with file:
        last = _last_step(file)
        every = max(1, -(-last // most)) if most else 1
        records: dict[int, Record] = {}
        for line in last_lines_of(file, _MOST_BYTES):
            begins = _BEGIN.match(line)
            is_chosen = begins is None or (number := int(begins[1])) == last or (number - 1) % every == 0
            if not is_chosen and number >= next(reversed(records), 0) and _VALIDATION not in line:
                continue  # most lines of a long run, which are not parsed
            record = parse_line(line)
            if record is None:
                continue
            step = record["step"]
            while records and next(reversed(records)) > step:  # steps are in order: later ones are at the end
                records.popitem()
            if not is_chosen:
                record = {key: value for key, value in record.items() if key in _OF_ALL or key.startswith("val/")}
            if is_chosen or len(record) > len(_OF_ALL):
                records[step] = {**records.get(step, {}), **record}
    return ThinnedRecords([completed(record) for record in records.values()], every)


def _last_step(file: IO[bytes]) -> int:
    """Return the step of the last complete line, 0 if there is none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    lines = file.read(_TAIL_BYTES).splitlines()
    return next((int(record["step"]) for line in reversed(lines) if (record := parse_line(line))), 0)


def parse_line(line: bytes | str) -> Record | None:
    """Return the record of one line, or None if the line is not a complete record. Values that are no finite numbers
    become None."""
    found = object_of(line)
    if found is None or not is_count(found.get("step")):
        return None
    record: Record = {key: value if is_number(value) else None for key, value in well_typed(found, _TYPES).items()}
    return record


def completed(record: Record) -> Record:
    """Return a record with the keys of every line. One that another program has written may lack them: its step is the
    last one, at the beginning of 1970."""
    return {"total_steps": record["step"], "time": 0.0, **record}


def has_validation(records: Sequence[Record], step: int) -> bool:
    """Return whether the records contain a validation after this step."""
    return any(record["step"] == step and any(name.startswith("val/") for name in record) for record in records)


def write_csv(records: Sequence[Record], out: TextIO) -> None:
    """Write one row per step, and a column for each metric that any step has. null and missing values are empty."""
    columns = list(dict.fromkeys([*_OF_ALL, *(key for record in records for key in record)]))
    table = csv.DictWriter(out, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(records)
