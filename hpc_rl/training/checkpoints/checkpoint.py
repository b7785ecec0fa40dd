"""Which checkpoint of a run is used: the one from which it resumes, and the newest. folders.py describes the files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from hpc_rl.errors import AgreedError, UserError
from hpc_rl.training.checkpoints import folders
from hpc_rl.training.checkpoints.folders import Progress, numbered, problem_of, progress_of, read_progress
from hpc_rl.training.checkpoints.model_state import UnreadableError
from hpc_rl.training.checkpoints.saver import TrainedModels
from hpc_rl.training.parallel.distributed import World


def load_latest(folder: Path, models: TrainedModels, world: World) -> Progress | None:
    """Load the newest usable checkpoint; return None if a run has none yet. Every rank calls this.

    A checkpoint that cannot be used is skipped with one line on stderr, and set aside.

    Raises:
        AgreedError: there are checkpoints but none is usable, and starting from the beginning would lose them.
    """
    found = [(str(path), asdict(progress)) for path, progress in usable(folder)] if world.is_main else None
    for path, progress in ((Path(path), progress_of(values)) for path, values in world.broadcast(found)):
        missing = [part for part in models.names if part not in progress.parts]
        try:
            if missing:
                raise UnreadableError(f"it has no {' and no '.join(missing)}")
            models.read(path)
        except UnreadableError as error:
            if world.is_main:
                _warn_skipped(path, str(error))
            continue
        world.together(lambda: folders.resume_after(folder, progress.step) if world.is_main else None)  # noqa: B023
        return progress
    world.together(lambda: refuse_none_usable(folder))
    return None


def usable(folder: Path) -> Iterator[tuple[Path, Progress]]:
    """Yield the complete checkpoints, newest first, and warn about the others."""
    for _, path in numbered(folder):
        if problem := problem_of(path):
            _warn_skipped(path, problem)
        else:
            yield path, read_progress(path)


def newest(folder: Path) -> tuple[Path, Progress] | None:
    """Return the newest complete checkpoint of a run, without reading its tensors."""
    return next(usable(folder), None)


def expected(folder: Path) -> Progress | None:
    """Return the progress of the checkpoint that a run will resume from unless its contents are damaged; None without
    one. It warns about no other, which `load_latest` does."""
    return next((read_progress(path) for _, path in numbered(folder) if problem_of(path) is None), None)


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


def _warn_skipped(path: Path, problem: str) -> None:
    print(f"warning: checkpoint {path} is skipped: {problem}", file=sys.stderr, flush=True)
