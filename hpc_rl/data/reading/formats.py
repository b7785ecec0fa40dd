"""Data files as rows: jsonl, JSON arrays, csv, tsv and parquet.

To add a format, write a function from a path to rows and add it to `FORMATS`. It spends as little as possible on rows
and columns that the caller does not need: lines are not parsed, and rows of a table are not converted. pyarrow is
imported only to read parquet, so that a login node without it can check the other formats.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, groupby, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rl.data.reading.arrow_values import decoders
from hpc_rl.errors import UserError
from hpc_rl.formats.large_files import check_parquet, refuse_pointer

if TYPE_CHECKING:
    from pyarrow import RecordBatch

Row = dict[str, Any]
OPTIONAL_COLUMNS = (
    *("tools", "functions", "chat_template_kwargs", "enable_thinking", "system", "input", "history"),
    *("images", "image", "videos", "video", "audios", "audio", "parallel_tool_calls", "margin"),
)
"""Columns that change what a row means. They are read besides those that the caller needs."""
Wanted = Callable[[int], bool]
"""Number of a row in its file, from 0 -> whether the caller needs it."""
Reader = Callable[[Path, Wanted, Sequence[str]], Iterator[Row | None]]
"""Reads a file: (path, wanted rows, wanted columns). Rows may have other columns too. See `read_some`."""

_FOLDER_FORMATS = (".arrow", ".gz", ".txt", ".xml", ".zip", ".zst")
"""What the `datasets` library reads from a folder besides the formats of this module."""


class CannotCheck(Exception):
    """The data may be valid, but this machine cannot read it; the message gives the reason."""


def is_file(name: str) -> bool:
    """Return whether a name in train_files or val_files is a file to read here, not a name for the `datasets` library.

    A file that exists is always read here, so that one of another format is reported as such.
    """
    return Path(name).suffix.lower() in FORMATS or Path(name).expanduser().is_file()


def read_rows(file: str | Path) -> Iterator[Row]:
    """Read the rows of a file in order, in the format that its suffix names. Empty lines are skipped.

    Raises:
        UserError: the file does not exist, has another format, is a git-lfs pointer, or has a row that cannot be read
            (the message gives the line).
        CannotCheck: the file is parquet and pyarrow is not installed.
    """
    return (row for row in read_some(file, lambda _: True) if row is not None)


def read_some(file: str | Path, wanted: Wanted, columns: Sequence[str] = ()) -> Iterator[Row | None]:
    """Read some rows of a file like `read_rows`, with None in the place of each other row.

    Args:
        columns: those that the caller needs. If the file has all of them, others may be left out. Empty: all.

    Raises:
        UserError, CannotCheck: see `read_rows`. Rows that are not wanted may be invalid.
    """
    path = data_file(file)
    try:
        refuse_pointer(path)
        for number, row in enumerate(FORMATS[path.suffix.lower()](path, wanted, columns), start=1):
            if row is not None:
                refuse_broken_text(row, f"{path}, row {number}")
            yield row
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def refuse_broken_text(row: Row, where: str) -> None:
    """Raise UserError if a text in a row cannot be written as UTF-8: JSON can name half of a pair of surrogates."""
    waiting: list[tuple[str, Any]] = [(str(name), value) for name, value in row.items()]
    for name, value in waiting:
        if isinstance(value, str):
            if not value.isascii() and not _is_utf8(value):
                raise UserError(f"{where}: not valid text in column {name!r} (a lone surrogate); repair or remove it")
        elif isinstance(value, dict):
            waiting += ((name, part) for pair in value.items() for part in pair)
        elif isinstance(value, list):
            waiting += ((name, part) for part in value)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def data_file(file: str | Path) -> Path:
    """Return the path of a data file.

    Raises:
        UserError: the file does not exist, or has another format.
    """
    path = Path(file).expanduser()
    if path.suffix.lower() not in FORMATS:
        raise UserError(unknown_format(path))
    if not path.is_file():
        raise UserError(f"{path}: no such data file")
    return path


def unknown_format(path: str | Path) -> str:
    """Return the message for a data file whose format is not read, with the formats that are."""
    suffix = Path(path).suffix
    found = f"{suffix} files are not read" if suffix else "the file name has no suffix"
    return f"{path}: {found}; convert it to one of {', '.join(FORMATS)}"


def check_data_folder(folder: Path) -> None:
    """Check that a data folder has at least one file that the `datasets` library reads.

    Raises:
        UserError: the folder is empty, or has only files of other formats.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    if not files:
        raise UserError(f"{folder}: the data folder is empty")
    if not any(path.suffix.lower() in (*FORMATS, *_FOLDER_FORMATS) for path in files):
        raise UserError(f"{folder}: no data file in this folder (found {files[0].name}); formats: {', '.join(FORMATS)}")


def _json_rows(path: Path, wanted: Wanted, _: Sequence[str]) -> Iterator[Row | None]:
    """Read one object per line, or an array of objects."""
    with path.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    is_array = first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    return _array_rows(path, wanted) if is_array else _line_rows(path, wanted)


def _line_rows(path: Path, wanted: Wanted) -> Iterator[Row | None]:
    with path.open("rb") as lines:
        filled = ((number, line) for number, line in enumerate(lines, start=1) if not line.isspace())
        for index, (number, line) in enumerate(filled):
            if not wanted(index):
                yield None
                continue
            where = f"{path}, line {number}"
            try:
                row = _DECODER.decode(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                hint = "; write one object per line, or an array of objects" if number == 1 else ""
                raise UserError(f"{where}: {_json_problem(error)}{hint}") from error
            yield _as_object(row, where)


def _array_rows(path: Path, wanted: Wanted) -> Iterator[Row | None]:
    """Read the objects of an array one by one, so that an error names its line and the first rows cost little.

    All of them are parsed, because only that shows where the next one begins.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text") from error
    at = _skip_space(text, text.index("[") + 1)
    line, counted, numbers = 1, 0, count()
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        where = f"{path}, line {line}"
        try:
            row, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: {_json_problem(error)}") from error
        found = _as_object(row, where)
        yield found if wanted(next(numbers)) else None
        at = _skip_space(text, at)
        if text[at : at + 1] == ",":
            at = _skip_space(text, at + 1)
        elif text[at : at + 1] != "]":
            line = text.count("\n", 0, at) + 1
            raise UserError(f"{path}, line {line}: not JSON (the array is not closed, or a comma is missing)")
    if text[at + 1 :].strip():
        line = text.count("\n", 0, _skip_space(text, at + 1)) + 1
        raise UserError(f"{path}, line {line}: not JSON (text after the end of the array)")


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _as_object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: found {kind_of(row)}; an object with the row's columns is needed")
    return row


def _unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, number in counts.items() if number > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)


def _json_problem(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg})"
    return "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def _csv_rows(path: Path, wanted: Wanted, _: Sequence[str], delimiter: str = ",") -> Iterator[Row | None]:
    """Read a table with a header row; every value is text."""
    csv.field_size_limit(sys.maxsize)  # the default ends at 131,072 characters, which a long document exceeds
    with path.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        header: list[str] = []
        numbers = count()
        try:
            for fields in rows:
                if not fields:
                    continue
                if not header:
                    header = fields
                    _check_header(header, path)
                    continue
                if len(fields) != len(header):
                    raise UserError(
                        f"{path}, line {rows.line_num}: values: {len(fields)}, columns in the header: {len(header)}"
                    )
                yield dict(zip(header, fields, strict=True)) if wanted(next(numbers)) else None
        except csv.Error as error:
            raise UserError(f"{path}, line {rows.line_num}: not readable as {path.suffix[1:]} ({error})") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text (after line {rows.line_num})") from error


def _check_header(header: list[str], path: Path) -> None:
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: the header has the column {twice!r} more than once")


def _tsv_rows(path: Path, wanted: Wanted, columns: Sequence[str]) -> Iterator[Row | None]:
    return _csv_rows(path, wanted, columns, delimiter="\t")


def _parquet_rows(path: Path, wanted: Wanted, columns: Sequence[str]) -> Iterator[Row | None]:
    check_parquet(path)
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise CannotCheck(f"{path} needs pyarrow, which is not installed here") from error
    try:
        with parquet.ParquetFile(path) as file:
            first = 0
            for batch in file.iter_batches(batch_size=1024, columns=needed(columns, file.schema_arrow.names)):
                for is_wanted, start, length in runs(first, first + batch.num_rows, wanted):
                    part = batch.slice(start - first, length)
                    yield from _batch_rows(part, path, start) if is_wanted else repeat(None, length)
                first += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as parquet ({str(error).splitlines()[0]})") from error


def _batch_rows(batch: RecordBatch, path: Path, first: int) -> Iterator[Row]:
    decode = decoders(batch.schema)
    try:
        rows: Iterable[Row] = batch.to_pylist()
    except UnicodeDecodeError:  # to find the row
        rows = (batch.slice(number, 1).to_pylist()[0] for number in range(batch.num_rows))
    number = first
    try:
        for row in rows:
            number += 1
            yield row | {name: one(row[name]) for name, one in decode.items()}
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, row {number + 1}: not valid text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, row {number}: not valid JSON ({error})") from error


def needed(columns: Sequence[str], known: Sequence[str]) -> list[str] | None:
    """Return the columns to read of those that a table has; None: all of them.

    All are read if one that the caller needs is missing, because the message about it lists those that exist.
    """
    if not columns or not set(columns) <= set(known):
        return None
    return [*columns, *(name for name in OPTIONAL_COLUMNS if name in known and name not in columns)]


def runs(start: int, end: int, wanted: Wanted) -> Iterator[tuple[bool, int, int]]:
    """Yield consecutive rows that are all wanted, or all not: (whether they are, the first one, their number)."""
    for is_wanted, group in groupby(range(start, end), key=wanted):
        numbers = list(group)
        yield is_wanted, numbers[0], len(numbers)


FORMATS: dict[str, Reader] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _tsv_rows,
    ".parquet": _parquet_rows,
}
"""Suffix -> reader."""


def kind_of(value: Any) -> str:
    """Describe a JSON value for an error message: "text", "a list", ..."""
    names = {
        type(None): "null",
        str: "text",
        list: "an empty list" if value == [] else "a list",
        dict: "an object",
        bool: "true or false",
        bytes: "bytes",
    }
    return names.get(type(value), "a number")
