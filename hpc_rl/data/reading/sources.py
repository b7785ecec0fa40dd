"""All rows of the files and data sets in train_files or val_files, and their division into parts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpc_rl.data.reading.arrow_values import decoders
from hpc_rl.data.reading.formats import (
    CannotCheck,
    Row,
    Wanted,
    data_file,
    is_file,
    needed,
    read_some,
    refuse_broken_text,
    runs,
)
from hpc_rl.data.reading.hub import load_split
from hpc_rl.errors import UserError
from hpc_rl.software.installation import install_command

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")

BLOCK_ROWS = 256
"""Rows that the tokenizer gets at a time and spreads over its threads. A part of the data has whole blocks."""
_ROWS_PER_READ = 4 * BLOCK_ROWS


def all_rows(files: Sequence[str], split: str) -> Iterator[tuple[Row, str]]:
    """Yield every row with its place ("FILE, row N"), file after file.

    Args:
        files: data files (formats.py), or names of `datasets` data sets.
        split: "train" or "test": the split of a `datasets` data set.

    Raises:
        UserError: a file is missing, unreadable or empty.
    """
    return _some_rows(files, split, lambda _: True)


def blocks(
    files: Sequence[str], split: str, part: int = 0, parts: int = 1, columns: Sequence[str] = ()
) -> Iterator[list[tuple[Row, str]]]:
    """Yield the blocks of rows of one part, in their order: those with the numbers part, part + parts, and so on.

    Rows of other parts and other columns are not parsed, where the format of a file allows it.

    Args:
        files, split: see `all_rows`.
        columns: see `read_some` in formats.py.

    Raises:
        UserError: a file is missing, unreadable or empty.
    """
    return chunks(_some_rows(files, split, lambda row: row // BLOCK_ROWS % parts == part, columns), BLOCK_ROWS)


def sources(files: Sequence[str], split: str) -> list[Any]:
    """Return what identifies the contents of each file or data set, as JSON can write it.

    It is the state of a file, the fingerprint of a data set, and both for a folder: the fingerprint may only stand for
    the names of its files.

    Raises:
        UserError: one of them is missing or cannot be read.
    """
    prints = ["" if is_file(name) else load_split(name, split)._fingerprint for name in files]
    return [prints, local_states(files)]


def local_states(files: Sequence[str]) -> list[Any]:
    """Return the state of each file and of all files of each folder, as JSON can write it; nothing for other data sets.

    Raises:
        UserError: one of them is missing or cannot be read.
    """
    return [_file_state(data_file(name)) if is_file(name) else _folder_state(Path(name)) for name in files]


def _folder_state(folder: Path) -> list[Any]:
    """Return the names and states of all files below a folder, if it exists, without hidden ones."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    shown = sorted(str(name) for name in names if not any(part.startswith(".") for part in name.parts))
    return [[name, _file_state(folder / name)] for name in shown]


def _file_state(path: Path) -> list[int]:
    """Return size, times and inode. No program can set the second time: a copy, or another file in its place, has
    another one, even if all the rest is the same."""
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _some_rows(
    files: Sequence[str], split: str, wanted: Wanted, columns: Sequence[str] = ()
) -> Iterator[tuple[Row, str]]:
    """Yield the rows that are wanted, by their numbers from 0 over all files."""
    before = 0
    for file in files:
        number = 0
        try:
            rows = _rows_of(file, split, lambda index, n=before: wanted(n + index), columns)
            for number, row in enumerate(rows, start=1):
                if row is not None:
                    if not is_file(file):
                        refuse_broken_text(row, f"{file}, row {number}")
                    yield row, f"{file}, row {number}"
        except CannotCheck as error:
            raise UserError(f"{error}: {install_command('train', sys.executable)}") from error
        if not number:
            raise UserError(f"{file}: the data set is empty")
        before += number


def _rows_of(file: str, split: str, wanted: Wanted, columns: Sequence[str]) -> Iterator[Row | None]:
    return read_some(file, wanted, columns) if is_file(file) else _split_rows(load_split(file, split), wanted, columns)


def _split_rows(dataset: Dataset, wanted: Wanted, columns: Sequence[str]) -> Iterator[Row | None]:
    if (read := needed(columns, dataset.column_names)) is not None:
        dataset = dataset.select_columns(read)
    decode = decoders(dataset.features.arrow_schema, has_json=False)
    for first in range(0, len(dataset), _ROWS_PER_READ):
        for is_wanted, start, length in runs(first, min(first + _ROWS_PER_READ, len(dataset)), wanted):
            if not is_wanted:
                yield from repeat(None, length)
                continue
            found = dataset[start : start + length]
            found |= {name: [one(value) for value in found[name]] for name, one in decode.items()}
            yield from (dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True))


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`; the last list may be shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
