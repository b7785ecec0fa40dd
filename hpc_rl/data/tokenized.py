"""Tokenized samples in Arrow files, which are mapped into memory instead of read.

A record batch has the samples of one block of rows (sources.py), without the dropped rows. With n files, block b is
batch b // n of file b % n, so that n ranks write at the same time, and any number of ranks reads.

Arrays of Arrow and numpy are made from each other's buffers: pyarrow's own conversions import pandas, which takes
seconds and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hpc_rl.data.formats import Row
from hpc_rl.data.lazy import Item, Rows, Sizes
from hpc_rl.data.pairs import Preference
from hpc_rl.data.sft_dataset import Counts, Sample
from hpc_rl.host.heartbeat import heart

T = TypeVar("T")

Tokenize = Callable[[Iterable[tuple[Row, str]]], tuple[Sequence[Item | None], Counts]]
"""Rows, each with its place for errors -> one item per row, None for a dropped row; and the counts of both."""


@dataclass(frozen=True)
class Form(Generic[T]):
    """What an item consists of."""

    samples: int
    """Number of its samples."""
    values: int
    """Number of its values: margins or labels."""
    make: Callable[[tuple[Sample, ...], tuple[float, ...]], T]
    """Returns an item of these samples and values."""

    @property
    def schema(self) -> pa.Schema:
        """The columns of the files: a token of a sample is twice its id, plus 1 if it is a target."""
        fields = [
            field
            for place in range(self.samples)
            for field in (
                pa.field(f"tokens_{place}", pa.list_(pa.int32())),
                pa.field(f"targets_{place}", pa.int32()),
            )
        ]
        values = [pa.field("values", pa.list_(pa.float64(), self.values))] if self.values else []
        return pa.schema([*fields, *values])


CHATS: Form[Sample] = Form(1, 0, lambda samples, _: samples[0])


def preferences(samples: int, values: int) -> Form[Preference]:
    """Return the form of pairs, or of responses with labels."""
    return Form(samples, values, Preference)


class Writer:
    """Writes one file."""

    def __init__(self, stream: IO[bytes], form: Form[Any]) -> None:
        self.kept: list[int] = []
        """Number of items in each block so far."""
        self._form = form
        self._file = pa.ipc.new_file(stream, form.schema)

    def write(self, items: Sequence[Item]) -> None:
        """Write the items of the next block of this file."""
        columns: list[pa.Array] = []
        for place in range(self._form.samples):
            columns += _columns([item.samples[place] for item in items])
        if self._form.values:
            flat = np.array([item.values for item in items], np.float64).ravel()  # type: ignore[attr-defined]
            columns.append(pa.FixedSizeListArray.from_arrays(_array(flat), self._form.values))
        self._file.write_batch(pa.record_batch(columns, schema=self._form.schema))
        self.kept.append(len(items))

    def close(self) -> None:
        """Write the end of the file. The stream stays open."""
        self._file.close()


class Tokenized(Rows[T]):
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
        self._last: tuple[int, _Block] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, index: int) -> T:
        """See `Rows.row`."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        block = self._block(number)
        at = index - int(self._ends[number]) + block.rows
        return self._form.make(tuple(block.sample(place, at) for place in range(self._form.samples)), block.values(at))

    def sizes(self) -> Sizes:
        """See `Rows.sizes`."""
        shape = (len(self), self._form.samples)
        lengths, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
        start = 0
        for number, end in enumerate(self._ends.tolist()):
            if end > start:
                heart.beat()
                block = self._block(number)
                lengths[start:end], targets[start:end] = block.lengths(), block.targets()
            start = end
        return Sizes(lengths, targets)

    def _block(self, number: int) -> _Block:
        if self._last is None or self._last[0] != number:
            file = self._files[number % len(self._files)]
            self._last = number, _Block(file.get_batch(number // len(self._files)), self._form)
        return self._last[1]


class _Block:
    """A record batch as arrays, which are views of the file."""

    def __init__(self, batch: pa.RecordBatch, form: Form[Any]) -> None:
        self.rows = batch.num_rows
        lists = [batch.column(2 * place).buffers() for place in range(form.samples)]
        self._offsets = [np.frombuffer(buffers[1], np.int32, self.rows + 1) for buffers in lists]
        self._tokens = [
            np.frombuffer(buffers[3], np.int32, int(offsets[-1]))
            for buffers, offsets in zip(lists, self._offsets, strict=True)
        ]
        self._targets = [
            np.frombuffer(batch.column(2 * place + 1).buffers()[1], np.int32, self.rows)
            for place in range(form.samples)
        ]
        values = batch.column(2 * form.samples).buffers()[2] if form.values else b""
        self._values = np.frombuffer(values, np.float64, self.rows * form.values).reshape(self.rows, form.values)

    def sample(self, place: int, row: int) -> Sample:
        start, end = self._offsets[place][row : row + 2]
        tokens = self._tokens[place][start:end]
        return Sample(input_ids=tokens >> 1, loss_mask=(tokens & 1).astype(bool))

    def values(self, row: int) -> tuple[float, ...]:
        return tuple(self._values[row].tolist())

    def lengths(self) -> NDArray[np.int64]:
        return np.stack([np.diff(offsets) for offsets in self._offsets], axis=1)

    def targets(self) -> NDArray[np.int64]:
        return np.stack(self._targets, axis=1)


def _columns(samples: Sequence[Sample]) -> list[pa.Array]:
    """Return tokens and numbers of targets."""
    offsets = np.cumsum([0, *(len(sample.input_ids) for sample in samples)], dtype=np.int32)
    marked = [sample.input_ids * 2 + sample.loss_mask for sample in samples]
    tokens = np.concatenate([np.zeros(0, np.int32), *marked], dtype=np.int32)
    targets = np.array([sample.loss_mask.sum() for sample in samples], np.int32)
    buffers = [None, pa.py_buffer(offsets)]
    lists = pa.ListArray.from_buffers(pa.list_(pa.int32()), len(samples), buffers, children=[_array(tokens)])
    return [lists, _array(targets)]


def _array(values: NDArray[Any]) -> pa.Array:
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])
