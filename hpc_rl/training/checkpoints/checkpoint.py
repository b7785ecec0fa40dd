"""Checkpoints of a run: everything that it needs to resume, with any number of ranks.

    checkpoints/step-00000010/
        trainer.json        Progress
        model/              one folder per trained model (model_state.py): `model`, or `actor` and `critic`

A checkpoint is written as `step-00000010.tmp` and renamed when all of its parts are complete. Training waits only for
a copy in host memory, and at most one checkpoint is being written.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpc_rl.config.training import TrainingConfig
from hpc_rl.errors import AgreedError, RunError, UserError
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.checkpoints.background import AFTER_ERROR_S, DEADLINE_S, BackgroundWriter
from hpc_rl.training.checkpoints.model_state import UnreadableError
from hpc_rl.training.distributed import World
from hpc_rl.training.models.causal_lm import PackedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL, ACTOR, CRITIC = "model", "actor", "critic"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Progress:
    """How far a run has come; trainer.json."""

    samples: int
    """Samples in the training data."""
    dtype: str
    """Type of the exported weights, such as bfloat16."""
    parts: tuple[str, ...] = (MODEL,)
    """Names of the trained models; the first one is exported."""
    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Epoch of the next sample."""
    index: int = 0
    """Samples of this epoch that have been used."""
    total_tokens: int = 0
    """Tokens trained on so far."""
    world_size: int = 1
    wandb_id: str | None = None
    kl_coef: float | None = None
    """Weight of the KL penalty, if it adapts."""


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


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of one step's checkpoint."""
    return folder / f"step-{step:08d}"


def begin(folder: Path, step: int) -> Path:
    """Create the folder for the parts of a new checkpoint, and remove unfinished ones. Only one process calls this.

    Raises:
        RunError: the folder cannot be written.
    """
    partial = _partial(folder, step)
    try:
        for leftover in folder.glob("step-*.tmp"):
            shutil.rmtree(leftover)
        partial.mkdir(parents=True)
    except OSError as error:
        raise RunError(f"{partial} could not be written: {error}") from error
    return partial


def commit(folder: Path, progress: Progress, keep: int) -> Path:
    """Name a checkpoint whose parts are all written, and remove all but the newest `keep` checkpoints.

    Raises:
        RunError: the folder cannot be written.
    """
    partial, final = _partial(folder, progress.step), step_folder(folder, progress.step)
    try:
        (partial / "trainer.json").write_text(json.dumps(asdict(progress), indent=1))
        if final.exists():  # an unreadable checkpoint of the same step, before which the run resumed
            shutil.rmtree(final)
        partial.rename(final)
        for _, old in _numbered(folder)[keep:]:
            shutil.rmtree(old)
    except OSError as error:
        raise RunError(f"{final} could not be written: {error}") from error
    return final


def usable(folder: Path) -> Iterator[tuple[Path, Progress]]:
    """Yield the complete checkpoints, newest first, and warn about the others."""
    for _, path in _numbered(folder):
        problem = _problem(path)
        if problem:
            warn_passed_over(path, problem)
        else:
            yield path, read_progress(path)


def newest(folder: Path) -> tuple[Path, Progress] | None:
    """Return the newest complete checkpoint of a run, without reading its tensors."""
    return next(usable(folder), None)


def refuse_none_usable(folder: Path) -> None:
    """Check that a run without a readable checkpoint has no unreadable ones either.

    Raises:
        AgreedError: it has some, and starting from the beginning would lose them.
    """
    if _numbered(folder):
        raise AgreedError(
            f"no checkpoint in {folder} can be read; to start from the beginning, remove that folder or choose another "
            "run directory"
        )


def refuse_other_data(folder: Path, progress: Progress, samples: int) -> None:
    """Raise AgreedError if a run would resume with other training data than it started with."""
    if progress.samples != samples:
        raise AgreedError(
            f"{folder} was trained on {progress.samples} samples, and the training data now has {samples}: "
            "use the same data, or choose another run directory"
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
        world.together(lambda: begin(folder, progress.step) if world.is_main else None)
        found = model_state.snapshot(model, optimizer, tokenizer, world, copy=not self._waits)

        def write(own: World) -> None:
            model_state.write(_partial(folder, progress.step) / MODEL, found, own)
            if own.is_main:
                commit(folder, progress, keep)

        self._writer.start(f"checkpoint {step_folder(folder, progress.step)}", write)
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

    A checkpoint that cannot be used is skipped with one line on stderr.

    Raises:
        AgreedError: there are checkpoints but none is usable, and starting from the beginning would lose them.
    """
    found = [(str(path), asdict(progress)) for path, progress in usable(folder)] if world.is_main else None
    for path, progress in ((Path(path), _progress(values)) for path, values in world.broadcast(found)):
        try:
            model_state.read(path / MODEL, model, optimizer, world)
        except UnreadableError as error:
            if world.is_main:
                warn_passed_over(path, str(error))
            continue
        return progress
    world.together(lambda: refuse_none_usable(folder))
    return None


def read_progress(path: Path) -> Progress:
    """Read the trainer.json of a checkpoint.

    Raises:
        OSError, ValueError, TypeError, KeyError: it is missing or not valid.
    """
    return _progress(json.loads((path / "trainer.json").read_text()))


def _progress(values: dict[str, Any]) -> Progress:
    return Progress(**{**values, "parts": tuple(values["parts"])})


def warn_passed_over(path: Path, problem: str) -> None:
    """Report a checkpoint that is skipped."""
    print(f"warning: checkpoint {path} is skipped: {problem}", file=sys.stderr, flush=True)


def find(source: Path, checkpoints: Path) -> Path:
    """Return `source` if it is a checkpoint, otherwise the newest one in `checkpoints`, a run's folder of them.

    Raises:
        UserError: `source` is not a checkpoint, and the folder has none.
    """
    if (source / "trainer.json").is_file():
        return source
    found = newest(checkpoints)
    if found is None:
        raise UserError(f"{source} is neither a checkpoint nor a run directory with one in checkpoints/")
    return found[0]


def _partial(folder: Path, step: int) -> Path:
    final = step_folder(folder, step)
    return final.with_name(final.name + ".tmp")


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of everything that has the name of a finished checkpoint, newest first."""
    found = [(int(m[1]), path) for path in folder.glob("step-*") if (m := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def _problem(path: Path) -> str | None:
    """Return why a folder is not a complete checkpoint, or None if it is one."""
    try:
        parts = read_progress(path).parts
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    problems = ((part, model_state.problem_of(path / part)) for part in parts)
    return next((f"{part}: {problem}" for part, problem in problems if problem), None)
