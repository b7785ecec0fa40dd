"""Samples in Arrow files: the form of tokenized data for fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hpc_rl.data.lazy import Item, Sizes
from hpc_rl.data.pairs import Preference
from hpc_rl.data.sft_dataset import Counts, Sample
from hpc_rl.data.tokenized import Form, ItemBlock, Lists, Tokenized, as_array, as_lists
from hpc_rl.liveness.heartbeat import heart

T = TypeVar("T", bound=Item)


@dataclass(frozen=True)
class Samples(Form[T]):
    """Items that consist of samples and values."""

    samples: int
    """Number of an item's samples."""
    values: int
    """Number of its values: margins or labels."""
    make: Callable[[tuple[Sample, ...], tuple[float, ...]], T]
    """Returns an item of these samples and values."""
    counts = Counts

    @property
    def schema(self) -> pa.Schema:
        """The columns of the files: a token is stored as twice its id, plus 1 if it is a target."""
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

    def columns(self, items: Sequence[T]) -> list[pa.Array]:
        columns: list[pa.Array] = []
        for place in range(self.samples):
            columns += _columns([item.samples[place] for item in items])
        if self.values:
            flat = np.array([item.values for item in items], np.float64).ravel()  # type: ignore[attr-defined]
            columns.append(pa.FixedSizeListArray.from_arrays(as_array(flat), self.values))
        return columns

    def block(self, batch: pa.RecordBatch) -> SampleBlock[T]:
        return SampleBlock(batch, self)

    def opened(self, paths: Sequence[Path], kept: Sequence[Sequence[int]], held: object = None) -> TokenizedSamples[T]:
        return TokenizedSamples(paths, kept, self, held)


CHATS: Samples[Sample] = Samples(1, 0, lambda samples, _: samples[0])


def preferences(samples: int, values: int) -> Samples[Preference]:
    """Return the form of pairs, or of responses with labels."""
    return Samples(samples, values, Preference)


class SampleBlock(ItemBlock[T]):
    """The items of a record batch, whose arrays are views of the file."""

    def __init__(self, batch: pa.RecordBatch, form: Samples[T]) -> None:
        self.count = batch.num_rows
        self._make = form.make
        self._tokens = [Lists(batch.column(2 * place), np.int32) for place in range(form.samples)]
        self._targets = [
            np.frombuffer(batch.column(2 * place + 1).buffers()[1], np.int32, self.count)
            for place in range(form.samples)
        ]
        values = batch.column(2 * form.samples).buffers()[2] if form.values else b""
        self._values = np.frombuffer(values, np.float64, self.count * form.values).reshape(self.count, form.values)

    def item(self, index: int) -> T:
        samples = tuple(_sample(lists.at(index)) for lists in self._tokens)
        return self._make(samples, tuple(self._values[index].tolist()))

    def sizes(self) -> Sizes:
        """Return the numbers of tokens of all items."""
        lengths = np.stack([lists.lengths() for lists in self._tokens], axis=1)
        return Sizes(lengths, np.stack(self._targets, axis=1))


class TokenizedSamples(Tokenized[T]):
    """Items whose numbers of tokens are read without the tokens."""

    _form: Samples[T]

    def sizes(self) -> Sizes:
        shape = (len(self), self._form.samples)
        found = Sizes(np.empty(shape, np.int64), np.empty(shape, np.int64))
        for start, block in self.blocks():
            heart.beat()
            found.lengths[start : start + block.count], found.targets[start : start + block.count] = block.sizes()
        return found


def _sample(tokens: NDArray[np.int32]) -> Sample:
    return Sample(input_ids=tokens >> 1, loss_mask=(tokens & 1).astype(bool))


def _columns(samples: Sequence[Sample]) -> list[pa.Array]:
    marked = as_lists([sample.input_ids * 2 + sample.loss_mask for sample in samples], np.int32)
    return [marked, as_array(np.array([sample.loss_mask.sum() for sample in samples], np.int32))]
