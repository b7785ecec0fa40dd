"""Usage files (node0-usage.jsonl and so on): what each node of an attempt used, one JSON object per line.

The first line describes the node, the next lines are samples, and the last line has the exit code:

    {"time": 1000.0, "node": "gpu01", "job_id": "123", "cpus": 32, "memory_gb": 256.0}
    {"time": 1002.0, "cpus": 12.3, "memory_gb": 41.2, "gpus": [[0.97, 61.2, 85.9]]}
    {"time": 4600.0, "exit_code": 0}

Times are Unix seconds, gigabytes are 10^9 bytes, and a GPU is [busy (0 to 1), memory used, memory]. A node that was
killed has no last line. Nodes write these files; login nodes and trainers read them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.formats.typed_json import Check, is_integer, is_job_id, is_number, is_text, is_time, object_of, well_typed
from hpc_rl.system.files import open_regular, open_to_append

_MOST_BYTES = 2**26
"""Of a usage file that are read: those of more than a week."""
_END_BYTES = 4096
"""More than the longest line. For tables of many runs only the ends of the files are read."""

Line = dict[str, Any]
_TYPES: dict[str, Check] = {
    **dict.fromkeys(("cpus", "memory_gb"), is_number),
    "node": is_text,
    "job_id": is_job_id,
    "exit_code": is_integer,
    "gpus": lambda value: isinstance(value, list),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU at one time."""

    busy: float | None
    """0 to 1; None if the driver does not report it (MIG)."""
    memory_gb: float
    total_gb: float


@dataclass(frozen=True)
class UsageSample:
    """What a node used at one time."""

    time: float
    cpus: float
    """Number of busy cores, averaged since the previous sample."""
    memory_gb: float
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class NodeUsage:
    """One node in one attempt."""

    rank: int
    node: str
    job_id: str
    cpus: int
    """CPUs that the job may use on this node; `memory_gb` is its memory."""
    memory_gb: float
    began: float
    """Unix time of the first line; `ended` is that of the last line."""
    ended: float
    exit_code: int | None = None
    """None while the node runs, and if it was killed."""
    samples: tuple[UsageSample, ...] = ()

    @property
    def hours(self) -> float:
        """Duration in hours."""
        return (self.ended - self.began) / 3600


def usage_file(attempt_dir: Path, node_rank: int) -> Path:
    """Return the path of a node's usage file."""
    return attempt_dir / f"node{node_rank}-usage.jsonl"


def append_line(path: Path, line: Line) -> None:
    """Append a line. If the disk is full the line is lost, and the job continues."""
    with contextlib.suppress(OSError), open_to_append(path) as file:
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")


def sample_line(sample: UsageSample) -> Line:
    """Return the line of a sample, rounded."""
    line: Line = {
        "time": round(sample.time, 1),
        "cpus": round(sample.cpus, 2),
        "memory_gb": round(sample.memory_gb, 3),
    }
    if sample.gpus:
        line["gpus"] = [[gpu.busy, round(gpu.memory_gb, 2), round(gpu.total_gb, 2)] for gpu in sample.gpus]
    return line


def read_usage(attempt_dir: Path) -> list[NodeUsage]:
    """Return the nodes of an attempt with all their samples, ordered by rank."""
    return _read_nodes(attempt_dir, ends_only=False)


def read_spans(attempt_dir: Path) -> list[NodeUsage]:
    """Return the nodes of an attempt with their last sample only, ordered by rank. Fast for any length of run."""
    return _read_nodes(attempt_dir, ends_only=True)


def parse_usage(rank: int, text: Iterable[str]) -> NodeUsage | None:
    """Parse a node's lines. Incomplete lines are skipped. Returns None if the first line is missing."""
    lines = [line for one in text if (line := _parse_line(one))]
    first = next((line for line in lines if "node" in line), None)
    if first is None:
        return None
    exit_codes = [int(line["exit_code"]) for line in lines if "exit_code" in line]
    return NodeUsage(
        rank=rank,
        node=str(first["node"]),
        job_id=str(first.get("job_id", "")),
        cpus=int(first.get("cpus", 0)),
        memory_gb=float(first.get("memory_gb", 0)),
        began=float(first["time"]),
        ended=max(float(line["time"]) for line in lines),
        exit_code=exit_codes[-1] if exit_codes else None,
        samples=tuple(_sample(line) for line in lines if "node" not in line and "memory_gb" in line),
    )


def _read_nodes(attempt_dir: Path, ends_only: bool) -> list[NodeUsage]:
    found = []
    for path in attempt_dir.glob("node*-usage.jsonl"):
        match = re.fullmatch(r"node(\d+)-usage\.jsonl", path.name)
        lines = _read_lines(path, ends_only)
        if match and (node := parse_usage(int(match[1]), lines)):
            found.append(node)
    return sorted(found, key=lambda node: node.rank)


def _read_lines(path: Path, ends_only: bool) -> list[str]:
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        first = file.readline(_END_BYTES)
        size = os.fstat(file.fileno()).st_size
        file.seek(max(file.tell(), size - (_END_BYTES if ends_only else _MOST_BYTES)))
        # The read may begin in the middle of a line, which is then not a JSON object and is skipped.
        rest = file.read(_MOST_BYTES).splitlines()
        return [part.decode(errors="replace") for part in (first, *(rest[-2:] if ends_only else rest))]
    return []


def _parse_line(text: str) -> Line | None:
    line = object_of(text)
    if line is None or not is_time(line.get("time")):
        return None
    line = well_typed(line, _TYPES)
    return {**line, "gpus": [gpu for gpu in line.get("gpus", ()) if _is_gpu(gpu)]}


def _is_gpu(value: Any) -> bool:
    """Return whether a value is [busy, memory used, memory]; the first is null on some GPUs."""
    if not isinstance(value, list) or len(value) != 3 or not all(is_number(part) for part in value[1:]):
        return False
    return value[0] is None or is_number(value[0])


def _sample(line: Line) -> UsageSample:
    gpus = tuple(Gpu(*gpu) for gpu in line.get("gpus", ()))
    return UsageSample(float(line["time"]), float(line.get("cpus", 0)), float(line["memory_gb"]), gpus)
