"""Sequences of samples that are not in memory: an item is made when it is read."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from hpc_rl.data.sft_dataset import Sample

T = TypeVar("T", covariant=True)

Sizes = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Tokens and target tokens of each sample of each item: [items, samples of an item]."""


class Item(Protocol):
    """What a micro-batch cannot divide, such as a sample or a pair of samples."""

    @property
    def samples(self) -> tuple[Sample, ...]: ...


class Rows(Sequence[T]):
    """A sequence whose items are made when they are read; a slice of it is a list."""

    @abstractmethod
    def row(self, index: int) -> T:
        """Return an item, by its index from 0 on."""

    def sizes(self) -> Sizes:
        """Return the numbers of tokens of all items."""
        return _counted(self)  # type: ignore[arg-type]

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.row(number) for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} items, and none with the index {index}")
        return self.row(number)


class Joined(Rows[T]):
    """The items of some sequences, one sequence after the other."""

    def __init__(self, *parts: Sequence[T]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def row(self, index: int) -> T:
        """See `Rows.row`."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - int(self._ends[part]) + len(self._parts[part])]

    def sizes(self) -> Sizes:
        """See `Rows.sizes`."""
        found = [sizes_of(part) for part in self._parts]  # type: ignore[arg-type]
        return np.concatenate([one[0] for one in found]), np.concatenate([one[1] for one in found])


class Span(Rows[T]):
    """Consecutive items of a sequence."""

    def __init__(self, items: Rows[T], start: int, end: int) -> None:
        self._items, self._start, self._end = items, start, end

    def __len__(self) -> int:
        return self._end - self._start

    def row(self, index: int) -> T:
        """See `Rows.row`."""
        return self._items.row(self._start + index)

    def sizes(self) -> Sizes:
        """See `Rows.sizes`."""
        lengths, targets = self._items.sizes()
        return lengths[self._start : self._end], targets[self._start : self._end]


def sizes_of(items: Sequence[Item]) -> Sizes:
    """Return the numbers of tokens of items, which have equal numbers of samples."""
    return items.sizes() if isinstance(items, Rows) else _counted(items)


def _counted(items: Sequence[Item]) -> Sizes:
    width = len(items[0].samples) if items else 1
    pairs = [(len(one.input_ids), int(one.loss_mask.sum())) for item in items for one in item.samples]
    lengths, targets = np.array(pairs, np.int64).reshape(len(items), width, 2).transpose(2, 0, 1)
    return lengths, targets
