"""Checkpoints of a run: everything that it needs to go on, at any number of ranks.

    checkpoints/step-00000010/
        trainer.json        Progress
        model/              one folder per trained model (model_state.py): `model`, or `actor` and `critic`

A checkpoint is written under `step-00000010.tmp` and renamed once every part of it is there.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpc_rl.errors import AgreedError, UserError
from hpc_rl.training import model_state
from hpc_rl.training.distributed import World
from hpc_rl.training.model import PackedModel
from hpc_rl.training.model_state import UnreadableError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL, ACTOR, CRITIC = "model", "actor", "critic"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Progress:
    """How far a run is; trainer.json."""

    samples: int
    """Samples in the training data."""
    dtype: str
    """Type of the weights."""
    parts: tuple[str, ...] = (MODEL,)
    """The trained models; the first is the one to export."""
    step: int = 0
    """Steps done."""
    epoch: int = 0
    """Epoch of the next sample."""
    index: int = 0
    """Samples of this epoch that are used already."""
    total_tokens: int = 0
    """Tokens trained on so far."""
    world_size: int = 1
    wandb_id: str | None = None
    kl_coef: float | None = None
    """Weight of the KL penalty, where it adapts."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def begin(folder: Path, step: int) -> Path:
    """The folder into which the parts of a new checkpoint are written; one process calls this."""
    for leftover in folder.glob("step-*.tmp"):
        shutil.rmtree(leftover)
    partial = _partial(folder, step)
    partial.mkdir(parents=True)
    return partial


def commit(folder: Path, progress: Progress, keep: int) -> Path:
    """Give a checkpoint whose parts are all written its name, and remove all but the newest `keep`."""
    partial, final = _partial(folder, progress.step), step_folder(folder, progress.step)
    (partial / "trainer.json").write_text(json.dumps(asdict(progress), indent=1))
    if final.exists():  # an unreadable one of the same step, which the run went back from
        shutil.rmtree(final)
    partial.rename(final)
    for _, old in _numbered(folder)[keep:]:
        shutil.rmtree(old)
    return final


def usable(folder: Path) -> Iterator[tuple[Path, Progress]]:
    """Complete checkpoints, newest first; warns of others."""
    for _, path in _numbered(folder):
        problem = _problem(path)
        if problem:
            warn_passed_over(path, problem)
        else:
            yield path, read_progress(path)


def newest(folder: Path) -> tuple[Path, Progress] | None:
    """The newest complete checkpoint of a run, without reading its tensors."""
    return next(usable(folder), None)


def refuse_none_usable(folder: Path) -> None:
    """Call where no checkpoint was read.

    Raises:
        AgreedError: there are some all the same, and starting from scratch would lose them.
    """
    if _numbered(folder):
        raise AgreedError(
            f"no checkpoint in {folder} can be read; to start from the beginning, remove that folder or take another "
            "run directory"
        )


def refuse_other_data(folder: Path, progress: Progress, samples: int) -> None:
    """Raise AgreedError where a run would go on with other data than it began with."""
    if progress.samples != samples:
        raise AgreedError(
            f"{folder} was trained on {progress.samples} samples, and the training data has {samples} "
            "now: take the same data, or another run directory"
        )


def save(
    folder: Path,
    model: PackedModel,
    optimizer: torch.optim.Optimizer,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
    world: World,
    keep: int,
) -> None:
    """Write a checkpoint with one part and remove all but the newest `keep`. Every rank calls this."""
    if world.is_main:
        begin(folder, progress.step)
    world.barrier()
    model_state.write(_partial(folder, progress.step) / MODEL, model, optimizer, tokenizer, world)
    if world.is_main:
        commit(folder, progress, keep)
    world.barrier()


def load_latest(folder: Path, model: PackedModel, optimizer: torch.optim.Optimizer, world: World) -> Progress | None:
    """Read the newest usable checkpoint into model and optimizer; None where there is none. Every rank calls this.

    A checkpoint that cannot be used is passed over with one line on stderr.

    Raises:
        AgreedError: there are checkpoints, but none can be used, so starting from scratch would lose them.
    """
    candidates = world.broadcast_object(list(usable(folder)) if world.is_main else None)
    for path, progress in candidates:
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
    found = json.loads((path / "trainer.json").read_text())
    return Progress(**{**found, "parts": tuple(found["parts"])})


def warn_passed_over(path: Path, problem: str) -> None:
    print(f"warning: checkpoint {path} is passed over: {problem}", file=sys.stderr, flush=True)


def find(source: Path, checkpoints: Path) -> Path:
    """The checkpoint that `source` is, or the newest one in `checkpoints`, the folder of that run directory.

    Raises:
        UserError: neither is there.
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
    """(step, folder) of everything that is named like a finished checkpoint, newest first."""
    found = [(int(m[1]), path) for path in folder.glob("step-*") if (m := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def _problem(path: Path) -> str | None:
    """Why a folder is no complete checkpoint."""
    try:
        parts = read_progress(path).parts
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    problems = ((part, model_state.problem_of(path / part)) for part in parts)
    return next((f"{part}: {problem}" for part, problem in problems if problem), None)
