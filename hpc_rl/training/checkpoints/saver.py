"""Saving: the trained models of a run, and what gives a checkpoint its name when all of them are written.

Training waits only for a copy in host memory, and at most one checkpoint is being written.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpc_rl.errors import RunError
from hpc_rl.training.checkpoints import folders, model_state
from hpc_rl.training.checkpoints.background import AFTER_ERROR_S, DEADLINE_S, BackgroundWriter
from hpc_rl.training.checkpoints.folders import MODEL, Progress
from hpc_rl.training.models.causal_lm import PackedModel
from hpc_rl.training.parallel.distributed import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainedModels(ABC):
    """The trained models of a run. Each is a part of a checkpoint, in a folder of its name. The first one is exported.

    Here is what fine-tuning and reinforcement learning do differently when they save and resume.
    """

    names: tuple[str, ...]

    @abstractmethod
    def begin(self, partial: Path, copy: bool) -> Callable[[World], None]:
        """Begin to save the models, with their optimizers, into a folder.

        Args:
            copy: training goes on while they are written.

        Returns:
            what a thread does until all of them are written. It raises RunError if one could not be written.
        """

    @abstractmethod
    def read(self, path: Path) -> None:
        """Load the models and optimizers of a checkpoint.

        Raises:
            UnreadableError: it cannot be read.
        """

    @abstractmethod
    def await_reports(self) -> None:
        """Wait until the processes that write have reported the end. Raises RunError if one of them failed."""

    def patience(self) -> tuple[float, str]:
        """Return how many seconds a run that failed waits for the parts, and the end of the error if that is over."""
        return AFTER_ERROR_S, "check the file system"

    @abstractmethod
    def give_up(self) -> None:
        """End what the thread does; see `begin`."""


class OneModel(TrainedModels):
    """The model of a run that trains only one, on the ranks that call this."""

    names = (MODEL,)

    def __init__(
        self,
        model: PackedModel,
        optimizer: torch.optim.Optimizer,
        tokenizer: PreTrainedTokenizerBase | None,
        world: World,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._world = world

    def begin(self, partial: Path, copy: bool) -> Callable[[World], None]:
        """Take a snapshot of the model, and return what writes it. Every rank calls this."""
        found = model_state.snapshot(self._model, self._optimizer, self._tokenizer, self._world, copy)
        return lambda own: model_state.write(partial / MODEL, found, own)

    def read(self, path: Path) -> None:
        """Load model and optimizer of a checkpoint. Every rank calls this."""
        model_state.read(path / MODEL, self._model, self._optimizer, self._world)

    def await_reports(self) -> None:
        """Do nothing: the thread itself writes."""

    def give_up(self) -> None:
        """Do nothing: a write cannot be ended."""


class Saver:
    """Writes the checkpoints of a run. Every rank of the world has one.

    As a context manager it waits for the write in progress at the end of the block; after an error only for a short
    time.

    Args:
        folder: the run's checkpoints.
        models: what a checkpoint contains.
        world: its rank 0 names the checkpoints.
        keep: number of checkpoints to keep.
        wait: whether `save` returns only when the checkpoint is complete. It then needs no copy in host memory.
    """

    def __init__(self, folder: Path, models: TrainedModels, world: World, keep: int, wait: bool = False) -> None:
        self._folder = folder
        self._models = models
        self._world = world
        self._keep = keep
        self._waits = wait
        self._writer = BackgroundWriter(world)

    def take_seconds(self) -> float | None:
        """Return how long a checkpoint took that has been written in the background since the last call, or None."""
        return None if self._waits else self._writer.take_seconds()

    def save(self, progress: Progress) -> None:
        """Copy the state of training to host memory, and write it in the background. Every rank calls this.

        Raises:
            RunError: this checkpoint, or the one before it, could not be written.
        """
        self.wait()
        world, folder, step = self._world, self._folder, progress.step
        progress = replace(progress, parts=self._models.names)
        world.together(lambda: folders.begin(folder, step) if world.is_main else None)
        with self._discarded(step):
            write_parts = self._models.begin(folders.partial_folder(folder, step), copy=not self._waits)

        def write(own: World) -> None:
            with self._discarded(step):
                write_parts(own)
                if own.is_main:
                    folders.name(folder, progress)

        def remove_old() -> None:
            if world.is_main:
                folders.remove_old(folder, self._keep)

        self._writer.start(f"checkpoint {folders.step_folder(folder, step)}", write, remove_old)
        if self._waits:
            self.wait()

    def wait(self, timeout_s: float = DEADLINE_S) -> None:
        """Wait until the latest checkpoint is complete.

        Raises:
            RunError: it could not be written, or not in time.
        """
        if self._writer.is_writing:
            try:
                self._models.await_reports()
            except RunError:
                self._models.give_up()
                with suppress(RunError):  # the one that was reported is the cause
                    self._writer.wait(AFTER_ERROR_S)
                raise
        self._writer.wait(timeout_s)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
            return
        try:
            self._writer.wait(*(self._models.patience() if self._writer.is_writing else (AFTER_ERROR_S,)))
        except RunError as error:  # the run has already failed for another reason
            print(f"warning: {error}", file=sys.stderr, flush=True)
        self._models.give_up()

    @contextmanager
    def _discarded(self, step: int) -> Iterator[None]:
        """Remove what has been written of a checkpoint if the block fails."""
        try:
            yield
        except RunError:
            if self._world.is_main:
                folders.discard(self._folder, step)
            raise
