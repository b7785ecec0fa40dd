"""The header of a safetensors file: https://huggingface.co/docs/safetensors/index#format

A file begins with the length of its header (8 bytes, little-endian) and the header, a JSON object that gives type,
shape and place of each tensor.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_LIMIT = 100_000_000
"""Longest header that the format allows, in bytes."""


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of all tensors by name, and the position of the first byte after the header.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a safetensors file.
    """
    with file.open("rb") as source:
        start = source.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LIMIT
        if length >= _LIMIT:
            raise ValueError(f"{file} is not a safetensors file")
        header = json.loads(source.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file} is not a safetensors file")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


def shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by name; the errors are those of `read_header`."""
    return {name: tuple(entry["shape"]) for name, entry in read_header(file)[0].items()}
