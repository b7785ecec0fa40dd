"""Checks for large files that were not copied or downloaded completely; each reads only a few bytes of the file."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

from hpc_rl.errors import UserError

_POINTER = b"version https://git-lfs"
_PARQUET = b"PAR1"
_PARQUET_ENCRYPTED = b"PARE"
_ZIP = b"PK\x03\x04"
_MAX_HEADER = 100_000_000
"""Largest header that the safetensors library accepts, in bytes."""
_AGAIN = "copy or download it again"


def check_large_file(path: Path) -> None:
    """Check one file of a model or a data set by its suffix.

    Raises:
        UserError: the file is empty, truncated, or a git-lfs pointer; the message names the file and the remedy.
    """
    refuse_pointer(path)
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty: {_AGAIN}")
    if check := _CHECKS.get(path.suffix.lower()):
        check(path)


def check_model_folder(folder: Path) -> None:
    """Check every weight, tokenizer and configuration file directly in a model folder.

    Raises:
        UserError: the first file, by name, that is not complete.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix in _MODEL_FILES and path.is_file():
            check_large_file(path)


def refuse_pointer(path: Path) -> None:
    """Raise UserError if the file is a git-lfs pointer, which git leaves in place of a file that it did not fetch."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise UserError(
                f"{path} is a git-lfs pointer instead of the file itself: run `git lfs pull` in {path.parent}"
            )


def check_safetensors(path: Path) -> None:
    """Compare the size of a safetensors file with the sizes in its header.

    The format: https://huggingface.co/docs/safetensors/index#format (8 bytes with the header's length, a JSON header
    whose `data_offsets` count from the header's end, then the data).

    Raises:
        UserError: the header is not readable, or the file is shorter or longer than its tensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        text = file.read(length) if 2 <= length <= min(_MAX_HEADER, size - 8) else b""
    if len(prefix) == 8 and size - 8 < length <= _MAX_HEADER:
        raise UserError(f"{path} is truncated: it has {size:,} bytes, and its header needs {8 + length:,}; {_AGAIN}")
    try:
        end = _end_of_data(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a safetensors file: its header cannot be read; {_AGAIN}") from error
    expected = 8 + length + end
    if size < expected:
        raise UserError(f"{path} is truncated: it has {size:,} of {expected:,} bytes; {_AGAIN}")
    if size > expected:
        raise UserError(f"{path} is damaged: it has {size:,} bytes and its header describes {expected:,}; {_AGAIN}")


def _end_of_data(header: Any) -> int:
    """Return the number of bytes of all tensors, from a safetensors header.

    Raises:
        ValueError, TypeError, KeyError: the header does not have the form that the format prescribes.
    """
    if not isinstance(header, dict):
        raise ValueError("not an object")
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            if not 0 <= start <= stop:
                raise ValueError(name)
            end = max(end, stop)
    return end


def check_torch_file(path: Path) -> None:
    """Check that a file of torch.save has the directory at its end (files older than torch 1.6 have none to check).

    Raises:
        UserError: the file is truncated.
    """
    with path.open("rb") as file:
        is_archive = file.read(len(_ZIP)) == _ZIP
    if is_archive and not zipfile.is_zipfile(path):
        raise UserError(f"{path} is truncated: the directory at the end of the file is missing; {_AGAIN}")


def check_parquet(path: Path) -> None:
    """Check the magic bytes at both ends of a parquet file (https://parquet.apache.org/docs/file-format/).

    Raises:
        UserError: the bytes are missing, or the file is encrypted.
    """
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(max(0, path.stat().st_size - 4))
        tail = file.read(4)
    if _PARQUET_ENCRYPTED in (head, tail):
        raise UserError(f"{path} is an encrypted parquet file, which cannot be read: decrypt it first")
    if head != _PARQUET:
        raise UserError(f"{path} is not a parquet file: it does not start with {_PARQUET.decode()}")
    if tail != _PARQUET or path.stat().st_size < 12:
        raise UserError(f"{path} is truncated: it does not end with {_PARQUET.decode()}; {_AGAIN}")


_CHECKS = {".safetensors": check_safetensors, ".bin": check_torch_file, ".parquet": check_parquet}
_MODEL_FILES = (".safetensors", ".bin", ".json", ".jinja", ".model")
