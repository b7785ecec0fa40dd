"""Sizes and checksums of the files of a folder, in its checksums.json. Standard library only.

    {"__0_0.distcp": {"bytes": 8192, "crc32": "1c291ca3"}, "hf/config.json": {"bytes": 640, "crc32": "0a1b2c3d"}}

CRC-32 finds every error of up to 32 bits in a row and misses one of 4 * 10^9 others. It is computed while a file is
written, and takes the place of the CRC-32 that torch.save would compute and torch.load does not verify.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hpc_rl.formats.typed_json import object_of
from hpc_rl.system.files import open_regular, read_regular, sync_folder, write_synced

NAME = "checksums.json"
_PIECE_BYTES = 8 * 2**20
_THREADS = 4
"""Files that one process reads at the same time; zlib computes without Python's lock."""


@dataclass(frozen=True)
class Checksum:
    """What a file contains."""

    size: int
    """Bytes."""
    crc32: int


class SummedStream:
    """A binary stream for writing that computes the checksum of what it passes on."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._size = self._crc32 = 0

    @property
    def checksum(self) -> Checksum:
        """Of everything written so far."""
        return Checksum(self._size, self._crc32)

    def write(self, data: Any) -> int:
        """Write bytes-like data."""
        self._crc32 = zlib.crc32(data, self._crc32)
        self._size += memoryview(data).nbytes
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def of_file(path: Path, beat: Callable[[], object] = lambda: None) -> Checksum:
    """Read a file and return its checksum.

    Args:
        beat: called after each part of a large file.

    Raises:
        OSError: it cannot be read.
    """
    size = crc32 = 0
    with open_regular(path) as file:
        buffer = memoryview(bytearray(min(_PIECE_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            crc32 = zlib.crc32(buffer[:count], crc32)
            size += count
            beat()
    return Checksum(size, crc32)


def write(folder: Path, sums: Mapping[str, Checksum]) -> None:
    """Write checksums.json, the last file of a folder, and force all of it to the disk.

    Raises:
        OSError: the folder cannot be written.
    """
    entries = {name: {"bytes": one.size, "crc32": f"{one.crc32:08x}"} for name, one in sums.items()}
    partial = folder / f"{NAME}.tmp"
    write_synced(partial, json.dumps(entries, indent=1) + "\n")
    partial.rename(folder / NAME)
    sync_folder(folder)


def read(folder: Path) -> dict[str, Checksum] | None:
    """Return the checksums of a folder by file name; None if it has none.

    Raises:
        OSError, ValueError: they cannot be read.
    """
    try:
        entries = object_of(read_regular(folder / NAME))
        if entries is None:
            raise ValueError(f"{NAME} is not a JSON object")
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in entries):
            raise ValueError(f"{NAME} names files of other folders")
        return {name: Checksum(int(one["bytes"]), int(one["crc32"], 16)) for name, one in entries.items()}
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{NAME} is not valid") from error


def wrong_size(folder: Path, sums: Mapping[str, Checksum]) -> str | None:
    """Return the first file that is missing or has another size, as text; None if there is none."""
    for name, expected in sums.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != expected.size:
            return f"{name} has {size} of {expected.size} bytes"
    return None


def wrong_contents(
    folder: Path, sums: Mapping[str, Checksum], names: Iterable[str], beat: Callable[[], object] = lambda: None
) -> str | None:
    """Read files and return the first one that cannot be read or has another checksum, as text; None if all match.

    Args:
        beat: see `of_file`; called by several threads.
    """

    def problem(name: str) -> str | None:
        try:
            found = of_file(folder / name, beat)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        return None if found == sums[name] else f"{name} does not match its checksum"

    with ThreadPoolExecutor(_THREADS, "checksums") as pool:
        return next(filter(None, pool.map(problem, names)), None)
