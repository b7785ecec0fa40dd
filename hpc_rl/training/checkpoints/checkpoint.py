"""Checkpoints of a run: everything that it needs to resume, with any number of ranks. folders.py describes the files.

Training waits only for a copy in host memory, and at most one checkpoint is being written.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpc_rl.config.training import TrainingConfig
from hpc_rl.errors import AgreedError, RunError, UserError
from hpc_rl.training.checkpoints import folders, model_state
from hpc_rl.training.checkpoints.background import AFTER_ERROR_S, DEADLINE_S, BackgroundWriter
from hpc_rl.training.checkpoints.folders import MODEL, Progress, numbered, progress_of, read_progress
from hpc_rl.training.checkpoints.model_state import UnreadableError
from hpc_rl.training.distributed import World
from hpc_rl.training.models.causal_lm import PackedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def due(step: int, every: int) -> bool:
    """Return whether an action with this interval in steps is due after this step (interval 0: never)."""
    return every > 0 and step % every == 0


def save_is_due(trainer: TrainingConfig, step: int, saved_at: float) -> bool:
    """Return whether a checkpoint is due after this step, by steps or by time. Clocks differ, so one process decides.

    Args:
        saved_at: `time.monotonic()` of the latest checkpoint.
    """
    late = trainer.save_minutes > 0 and time.monotonic() - saved_at >= 60 * trainer.save_minutes
    return late or due(step, trainer.save_freq)


def usable(folder: Path) -> Iterator[tuple[Path, Progress]]:
    """Yield the complete checkpoints, newest first, and warn about the others."""
    for _, path in numbered(folder):
        if problem := problem_of(path):
            warn_passed_over(path, problem)
        else:
            yield path, read_progress(path)


def problem_of(path: Path) -> str | None:
    """Return why a folder is not a complete checkpoint, judged by names and sizes of its files; None if it is one."""
    if problem := folders.problem_of(path):
        return problem
    problems = ((part, model_state.problem_of(path / part)) for part in read_progress(path).parts)
    return next((f"{part}/{problem}" for part, problem in problems if problem), None)


def newest(folder: Path) -> tuple[Path, Progress] | None:
    """Return the newest complete checkpoint of a run, without reading its tensors."""
    return next(usable(folder), None)


def expected(folder: Path) -> Progress | None:
    """Return the progress of the checkpoint that a run will resume from unless its contents are damaged; None without
    one. It warns about no other, which `load_latest` does."""
    return next((read_progress(path) for _, path in numbered(folder) if problem_of(path) is None), None)


def refuse_none_usable(folder: Path) -> None:
    """Check that a run without a readable checkpoint has no unreadable ones either.

    Raises:
        AgreedError: it has some, and starting from the beginning would lose them.
    """
    if numbered(folder):
        raise AgreedError(
            f"no checkpoint in {folder} can be read; to start from the beginning, remove that folder or choose another "
            "run directory"
        )


def refuse_other_data(folder: Path, progress: Progress, samples: int | None) -> None:
    """Raise AgreedError if a run would resume with other training data than it started with.

    Args:
        samples: in the training data now. None: its position does not depend on their number.
    """
    if samples is not None and progress.samples != samples:
        raise AgreedError(
            f"{folder} was trained on {progress.samples} samples, and the training data now has {samples}: "
            "use the same data, or choose another run directory"
        )


def refuse_other_quantize(folder: Path, progress: Progress, quantize: str | None) -> None:
    """Raise AgreedError if adapters would continue on weights that are quantised in another way (model.lora.quantize)
    than those that they were trained on."""
    if progress.quantize != quantize:
        theirs, ours = (one or "null" for one in (progress.quantize, quantize))
        raise AgreedError(
            f"{folder} was trained with model.lora.quantize={theirs}, and the run has {ours}: set the option back, or "
            "choose another run directory"
        )


class Saver:
    """Writes the checkpoints of a run with one model. Every rank has one.

    As a context manager it waits for the write in progress at the end of the block.

    Args:
        folder: the run's checkpoints.
        keep: number of checkpoints to keep.
        wait: whether `save` returns only when the checkpoint is complete. It then needs no copy in host memory.
    """

    def __init__(self, folder: Path, world: World, keep: int, wait: bool = False) -> None:
        self._folder = folder
        self._world = world
        self._keep = keep
        self._waits = wait
        self._writer = BackgroundWriter(world)

    def take_seconds(self) -> float | None:
        """Return how long a checkpoint took that has been written in the background since the last call, or None."""
        return None if self._waits else self._writer.take_seconds()

    def save(
        self,
        model: PackedModel,
        optimizer: torch.optim.Optimizer,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress,
    ) -> None:
        """Copy the state of training to host memory, and write it in the background. Every rank calls this.

        Raises:
            RunError: this checkpoint, or the one before it, could not be written.
        """
        self.wait()
        world, folder, keep = self._world, self._folder, self._keep
        world.together(lambda: folders.begin(folder, progress.step) if world.is_main else None)
        found = model_state.snapshot(model, optimizer, tokenizer, world, copy=not self._waits)

        def write(own: World) -> None:
            try:
                model_state.write(folders.partial_folder(folder, progress.step) / MODEL, found, own)
                if own.is_main:
                    folders.commit(folder, progress, keep)
            except RunError:
                if own.is_main:
                    folders.discard(folder, progress.step)
                raise

        self._writer.start(f"checkpoint {folders.step_folder(folder, progress.step)}", write)
        if self._waits:
            self.wait()

    def wait(self, timeout_s: float = DEADLINE_S) -> None:
        """Wait until the latest checkpoint is complete.

        Raises:
            RunError: it could not be written, or not in time.
        """
        self._writer.wait(timeout_s)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
            return
        with explained_after_error():
            self.wait(AFTER_ERROR_S)


@contextmanager
def explained_after_error() -> Iterator[None]:
    """Print an error instead of raising it, because the run has already failed for another reason."""
    try:
        yield
    except RunError as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)


def load_latest(folder: Path, model: PackedModel, optimizer: torch.optim.Optimizer, world: World) -> Progress | None:
    """Read the newest usable checkpoint into model and optimizer; return None if there is none. Every rank calls this.

    A checkpoint that cannot be used is skipped with one line on stderr, and set aside.

    Raises:
        AgreedError: there are checkpoints but none is usable, and starting from the beginning would lose them.
    """
    found = [(str(path), asdict(progress)) for path, progress in usable(folder)] if world.is_main else None
    for path, progress in ((Path(path), progress_of(values)) for path, values in world.broadcast(found)):
        try:
            model_state.read(path / MODEL, model, optimizer, world)
        except UnreadableError as error:
            if world.is_main:
                warn_passed_over(path, str(error))
            continue
        world.together(lambda: folders.resume_after(folder, progress.step) if world.is_main else None)  # noqa: B023
        return progress
    world.together(lambda: refuse_none_usable(folder))
    return None


def warn_passed_over(path: Path, problem: str) -> None:
    """Report a checkpoint that is skipped."""
    print(f"warning: checkpoint {path} is skipped: {problem}", file=sys.stderr, flush=True)


def find(source: Path, checkpoints: Path) -> Path:
    """Return `source` if it is a checkpoint, otherwise the newest one in `checkpoints`, a run's folder of them.

    Raises:
        UserError: `source` is not a complete checkpoint, and the folder has none.
    """
    if (source / folders.TRAINER).is_file():
        if problem := problem_of(source):
            raise UserError(f"checkpoint {source} cannot be used: {problem}; use another step of the run")
        return source
    found = newest(checkpoints)
    if found is None:
        raise UserError(f"{source} is neither a checkpoint nor a run directory with one in checkpoints/")
    return found[0]
