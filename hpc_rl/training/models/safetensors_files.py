"""The safetensors format, read and written in parts; formats/safetensors_header.py describes it.

The library maps whole files into memory, and a mapped file counts as memory of the process. These functions read and
write with one buffer of bounded size, which is also faster on network file systems.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpc_rl.formats.safetensors_header import read_header

BUFFER_BYTES = 64 * 2**20
"""Size of the pieces in which tensors are read and written."""

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    """First byte in the file."""

    @property
    def row_shape(self) -> torch.Size:
        """Shape of one row; a tensor without dimensions has one row."""
        return self.shape[1:]

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return math.prod(self.row_shape) * self.dtype.itemsize

    def rows(self, first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (number of the first row, some rows) in order, at most BUFFER_BYTES (but at least a row) at a time.

        The tensors share one buffer: use each of them before the next.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is shorter than its header states.
        """
        step = max(1, BUFFER_BYTES // max(1, self.row_bytes))
        buffer = np.empty(min(step, count) * self.row_bytes, np.uint8)
        with self.file.open("rb", buffering=0) as source:
            source.seek(self.offset + first * self.row_bytes)
            for start in range(first, first + count, step):
                rows = min(step, first + count - start)
                part = buffer[: rows * self.row_bytes]
                _fill(source.readinto, part.data, self.file)
                yield start, torch.from_numpy(part).view(self.dtype).view(rows, *self.row_shape)

    def whole(self) -> torch.Tensor:
        """Return the tensor; the errors are those of `rows`."""
        rows = [part.clone() for _, part in self.rows(0, self.shape[0] if self.shape else 1)]
        return torch.cat(rows).view(self.shape)


def contents(file: Path) -> dict[str, Stored]:
    """Return the tensors of a file by name.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a complete safetensors file, or a tensor has a type that torch cannot train.
    """
    header, start = read_header(file)
    size = file.stat().st_size
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in _TYPES:
            raise ValueError(f"{name} in {file} has the type {entry['dtype']}, and only {', '.join(_TYPES)} are read")
        begin, end = entry["data_offsets"]
        if start + end > size:
            raise ValueError(f"{file} has {size:,} bytes, and its header states at least {start + end:,}")
        found[name] = Stored(file, _TYPES[entry["dtype"]], torch.Size(entry["shape"]), start + begin)
    return found


def write(
    file: Path,
    tensors: Mapping[str, torch.Size],
    dtypes: Mapping[str, torch.dtype],
    read: Callable[[str], torch.Tensor],
) -> None:
    """Write a file, one tensor at a time.

    Args:
        tensors: names and shapes.
        read: returns the tensor of a name; called once for each name, in order.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        end = offset + math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": _NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as out:
        _write_all(out.write, struct.pack("<Q", len(text)) + text)
        for name in tensors:
            flat = read(name).to(dtypes[name]).contiguous().reshape(-1).view(torch.uint8)
            for piece in flat.split(BUFFER_BYTES):
                _write_all(out.write, piece.numpy().data)


def split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return names in groups, in order, so that the sizes of a group sum to at most `limit` or it has one name."""
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if groups[-1] and total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups


def index(groups: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> tuple[list[str], str | None]:
    """Return the names of a model's files and the text of their index; a single file needs none."""
    if len(groups) == 1:
        return ["model.safetensors"], None
    files = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    places = {name: file for file, group in zip(files, groups, strict=True) for name in group}
    total = {"total_size": sum(sizes.values())}
    return files, json.dumps({"metadata": total, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"


def _fill(read_into: Callable[[memoryview], int | None], part: memoryview, file: Path) -> None:
    while len(part):
        count = read_into(part)  # the kernel reads at most 2 GiB at a time
        if not count:
            raise ValueError(f"{file} ended {len(part):,} bytes too early")
        part = part[count:]


def _write_all(write_some: Callable[[bytes | memoryview], int | None], data: bytes | memoryview) -> None:
    left = memoryview(data)
    while len(left):
        left = left[write_some(left) or 0 :]
