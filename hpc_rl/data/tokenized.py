"""Tokenized data in Arrow files, which are mapped into memory instead of read.

A record batch has the items of one block of rows (sources.py), without the dropped rows. With n files, block b is
batch b // n of file b % n, so that n ranks write at the same time, and any number of ranks reads.

Arrays of Arrow and numpy are made from each other's buffers: pyarrow's own conversions import pandas, which takes
seconds and memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from hpc_rl.data.lazy import LazyRows
from hpc_rl.data.reading.formats import Row

T = TypeVar("T")

Tokenize = Callable[[Iterable[tuple[Row, str]]], tuple[Sequence[Any], Any]]
"""Rows, each with its place for errors -> their items and their counts. A dropped row gives None or no item. The counts
have the type `Form.counts`."""


class Unstorable(Exception):
    """A value cannot be stored in files. The message has the reason."""


class ItemBlock(ABC, Generic[T]):
    """The items of one block of rows."""

    count: int
    """Number of items."""

    @abstractmethod
    def item(self, index: int) -> T:
        """Return an item, by its number from 0 on."""


class Form(ABC, Generic[T]):
    """What an item consists of, and how files hold it."""

    counts: type[Any]
    """Type of the counts of rows: a dataclass of numbers, which can be added."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The columns of the files."""

    @abstractmethod
    def columns(self, items: Sequence[T]) -> list[pa.Array]:
        """Return the columns of some items.

        Raises:
            Unstorable: a column cannot hold one of the values.
        """

    @abstractmethod
    def block(self, batch: pa.RecordBatch) -> ItemBlock[T]:
        """Return the items of a record batch."""

    def opened(self, paths: Sequence[Path], kept: Sequence[Sequence[int]], held: object = None) -> Tokenized[T]:
        """Return the items of some files; see `Tokenized`."""
        return Tokenized(paths, kept, self, held)


class Writer(Generic[T]):
    """Writes one file."""

    def __init__(self, stream: IO[bytes], form: Form[T]) -> None:
        self.kept: list[int] = []
        """Number of items in each block so far."""
        self._form = form
        self._file = pa.ipc.new_file(stream, form.schema)

    def write(self, items: Sequence[T]) -> None:
        """Write the items of the next block of this file. Raises Unstorable; see `Form.columns`."""
        self._file.write_batch(pa.record_batch(self._form.columns(items), schema=self._form.schema))
        self.kept.append(len(items))

    def close(self) -> None:
        """Write the end of the file. The stream stays open."""
        self._file.close()


class Tokenized(LazyRows[T]):
    """The items of some files. In memory are the numbers of items of all blocks.

    Args:
        paths: the files.
        kept: for each file, the number of items in each of its blocks.
        held: an object that is kept as long as this one.

    Raises:
        OSError, pyarrow.ArrowException, ValueError: a file cannot be read, or is none of these files.
    """

    def __init__(
        self, paths: Sequence[Path], kept: Sequence[Sequence[int]], form: Form[T], held: object = None
    ) -> None:
        self._form, self._held = form, held
        self._files = [pa.ipc.open_file(pa.memory_map(str(path))) for path in paths]
        for path, file, numbers in zip(paths, self._files, kept, strict=True):
            if file.schema != form.schema or file.num_record_batches != len(numbers):
                raise ValueError(f"{path.name} does not contain what it should")
        count = sum(map(len, kept))
        by_block = [kept[block % len(paths)][block // len(paths)] for block in range(count)]
        self._ends = np.cumsum(by_block, dtype=np.int64)
        self._last: tuple[int, ItemBlock[T]] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, index: int) -> T:
        number = int(np.searchsorted(self._ends, index, side="right"))
        block = self._block(number)
        return block.item(index - int(self._ends[number]) + block.count)

    def blocks(self) -> Iterator[tuple[int, ItemBlock[T]]]:
        """Yield all blocks that have items, each with the index of its first item."""
        start = 0
        for number, end in enumerate(self._ends.tolist()):
            if end > start:
                yield start, self._block(number)
            start = end

    def _block(self, number: int) -> ItemBlock[T]:
        last = self._last
        if last is None or last[0] != number:
            file = self._files[number % len(self._files)]
            self._last = last = number, self._form.block(file.get_batch(number // len(self._files)))
        return last[1]  # another thread may have read another block meanwhile


class Lists:
    """A column of lists, strings or bytes, as views of its buffers.

    Args:
        column: its values are lists or bytes, with elements of the type `element`.
        offset: type of the column's offsets.
    """

    def __init__(self, column: pa.Array, element: DTypeLike, offset: DTypeLike = np.int32) -> None:
        buffers = column.buffers()
        self._offsets = np.frombuffer(buffers[1], offset, len(column) + 1)
        self._elements = np.frombuffer(buffers[-1] or b"", element, int(self._offsets[-1]))

    def at(self, row: int) -> NDArray[Any]:
        """Return the elements of one value."""
        return self._elements[self._offsets[row] : self._offsets[row + 1]]

    def lengths(self) -> NDArray[Any]:
        """Return the number of elements of each value."""
        return np.diff(self._offsets)


def as_lists(values: Sequence[NDArray[Any]], element: DTypeLike) -> pa.Array:
    """Return one-dimensional arrays as a column of lists with elements of this type."""
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    elements = as_array(np.concatenate([np.zeros(0, element), *values], dtype=element))
    return pa.ListArray.from_buffers(
        pa.list_(elements.type), len(values), [None, pa.py_buffer(offsets)], children=[elements]
    )


def as_bytes(values: Sequence[bytes]) -> pa.Array:
    """Return bytes as a column of type large_binary."""
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def as_array(values: NDArray[Any]) -> pa.Array:
    """Return a one-dimensional array as a column."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])
