"""What a run draws its batches from: all training data at once, or windows of it (windows.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.training.finetune import FinetuneConfig
from hpc_rl.data.lazy import Item, Sizes, sizes_of
from hpc_rl.data.mixture import Mixture
from hpc_rl.data.order import Position, batches, steps_per_epoch


class GlobalBatch(NamedTuple):
    """A global batch."""

    items: Sequence[Item]
    """All items of the data, or of a window."""
    indices: NDArray[np.int64]
    """Those of the batch, [at most data.train_batch_size]."""
    sizes: Sizes
    """The numbers of tokens of those of the batch."""
    position: Position
    """The one after it."""


class TrainingData(ABC):
    """The training data of a run. All ranks draw the same batches."""

    items: Sequence[Any] = ()
    """The items that batches are drawn from at present."""
    sizes: Sizes
    """Their numbers of tokens."""

    def __init__(self, config: FinetuneConfig) -> None:
        self._config = config
        self._batches: Iterator[tuple[NDArray[np.int64], Position]] = iter(())
        self.sizes = sizes_of(self.items)

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """The number of steps of the run."""

    @abstractmethod
    def resume(self, position: Position, steps: int) -> None:
        """Continue after a position, for so many steps. Every rank calls this before the first `draw`."""

    @property
    def needs_more(self) -> bool:
        """Whether `advance` has to be called before the next `draw`."""
        return False

    def advance(self) -> None:  # noqa: B027 - may be left out
        """Bring the items of the next batches. Every rank calls this.

        Raises:
            AgreedError: they cannot be brought.
            Stopped: the run stops in the meantime.
        """

    def draw(self) -> GlobalBatch:
        """Return the next batch."""
        indices, position = next(self._batches)
        return GlobalBatch(self.items, indices, self.sizes.at(indices), position)

    @abstractmethod
    def samples(self, position: Position) -> int | None:
        """Return the number of samples among which a position counts, which is the same when the run resumes; None if
        it counts among none."""

    @abstractmethod
    def progress(self, position: Position) -> dict[str, float]:
        """Return how much of the data has been used, as metrics."""

    def close(self, is_done: bool) -> None:  # noqa: B027 - may be left out
        """End what reads data; if the run is done, remove what only this run needs. Every rank calls this."""

    def _begin(self, position: Position, mixture: Mixture | None = None) -> None:
        """Draw batches of the present items from now on."""
        data, seed = self._config.data, self._config.trainer.seed
        self._batches = batches(
            len(self.items), data.train_batch_size, seed=seed, shuffle=data.shuffle, start=position, mixture=mixture
        )


class Epochs(TrainingData):
    """All training data, epoch after epoch.

    Args:
        mixture: the proportions in which files are used, if these have weights.
    """

    def __init__(self, items: Sequence[Any], config: FinetuneConfig, mixture: Mixture | None = None) -> None:
        self.items = items
        super().__init__(config)
        self.mixture = mixture
        self._begin(Position(), mixture)

    @property
    def total_steps(self) -> int:
        """The number of steps of all epochs, or the option."""
        trainer, each = self._config.trainer, steps_per_epoch(len(self.items), self._config.data.train_batch_size)
        return trainer.total_training_steps or trainer.total_epochs * each

    def resume(self, position: Position, steps: int) -> None:
        """Continue after a position."""
        self._begin(position, self.mixture)

    def samples(self, position: Position) -> int | None:
        """Return the number of all items."""
        return len(self.items)

    def progress(self, position: Position) -> dict[str, float]:
        """Return how many epochs have been used, as metrics."""
        return {"train/epoch": position.epoch + position.index / len(self.items)}
