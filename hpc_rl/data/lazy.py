"""Sequences of samples that are not in memory: an item is made when it is read."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from hpc_rl.data.sft_dataset import Sample
from hpc_rl.liveness.heartbeat import heart

T = TypeVar("T", covariant=True)

_ITEMS_PER_BEAT = 256


class Item(Protocol):
    """What a micro-batch cannot divide, such as a sample or a pair of samples."""

    @property
    def samples(self) -> tuple[Sample, ...]: ...


class Sizes(NamedTuple):
    """The numbers of tokens of items, by which a batch is divided before any item is read."""

    lengths: NDArray[np.int64]
    """Tokens of each sample of each item, [items, samples of an item]."""
    targets: NDArray[np.int64]
    """Target tokens of the same."""

    def at(self, indices: NDArray[np.int64] | slice) -> Sizes:
        """Return those of some items."""
        return Sizes(self.lengths[indices], self.targets[indices])


class LazyRows(Sequence[T]):
    """A sequence whose items are made when they are read; a slice of it is a list."""

    @abstractmethod
    def row(self, index: int) -> T:
        """Return an item, by its index from 0 on."""

    def sizes(self) -> Sizes:
        """Return the numbers of tokens of all items."""
        return _counted(self)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        for index in range(len(self)):
            if index % _ITEMS_PER_BEAT == 0:
                heart.beat()  # whoever reads all items needs no further heartbeats
            yield self.row(index)

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


class Joined(LazyRows[T]):
    """The items of some sequences, one sequence after the other."""

    def __init__(self, *parts: Sequence[T]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def row(self, index: int) -> T:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - int(self._ends[part]) + len(self._parts[part])]

    def sizes(self) -> Sizes:
        return joined_sizes(*map(sizes_of, self._parts)) if self._parts else super().sizes()  # type: ignore[arg-type]


class Subsequence(LazyRows[T]):
    """The items of a sequence from one index up to another, as in a slice; they are read when they are needed.

    Args:
        start, end: as in a slice of the sequence; neither is negative.
    """

    def __init__(self, items: Sequence[T], start: int, end: int | None) -> None:
        self._items = items
        self._range = range(*slice(start, end).indices(len(items)))

    def __len__(self) -> int:
        return len(self._range)

    def row(self, index: int) -> T:
        return self._items[self._range[index]]


def sizes_of(items: Sequence[Item]) -> Sizes:
    """Return the numbers of tokens of items, which have equal numbers of samples."""
    return items.sizes() if isinstance(items, LazyRows) else _counted(items)


def joined_sizes(*parts: Sizes) -> Sizes:
    """Return the numbers of tokens of `Joined` items."""
    found = [part for part in parts if len(part.lengths)]  # without items, the number of samples is not known
    lengths, targets = zip(*(found or parts[:1]), strict=True)
    return Sizes(np.concatenate(lengths), np.concatenate(targets))


def _counted(items: Sequence[Item]) -> Sizes:
    width = len(items[0].samples) if len(items) else 1
    lengths, targets = np.empty((len(items), width), np.int64), np.empty((len(items), width), np.int64)
    for index, item in enumerate(items):
        lengths[index] = [len(one.input_ids) for one in item.samples]
        targets[index] = [one.loss_mask.sum() for one in item.samples]
    return Sizes(lengths, targets)
