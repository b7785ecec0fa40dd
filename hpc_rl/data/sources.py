"""All rows of the files and data sets in train_files or val_files."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from hpc_rl.data.formats import CannotCheck, Row, is_file, read_rows
from hpc_rl.data.hub import load_split
from hpc_rl.errors import UserError
from hpc_rl.host.installation import install_command

T = TypeVar("T")


def all_rows(files: Sequence[str], split: str) -> Iterator[tuple[Row, str]]:
    """Yield every row with its place ("FILE, row N"), file after file.

    Args:
        files: data files (formats.py), or names of `datasets` data sets.
        split: "train" or "test": the split of a `datasets` data set.

    Raises:
        UserError: a file is missing, unreadable or empty.
    """
    for file in files:
        try:
            rows: Iterable[Row] = read_rows(file) if is_file(file) else load_split(file, split)
            number = 0
            for number, row in enumerate(rows, start=1):
                yield row, f"{file}, row {number}"
        except CannotCheck as error:
            raise UserError(f"{error}: {install_command('train', sys.executable)}") from error
        if not number:
            raise UserError(f"{file}: the data set is empty")


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`; the last list may be shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
