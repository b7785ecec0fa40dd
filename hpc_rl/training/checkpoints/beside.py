"""The checkpoints of a run for a job that scores them while the run trains. Standard library only.

The run may remove a checkpoint at any time (trainer.max_ckpt_to_keep). So a job that reads one links its files into a
folder of its own first: the run is not in its way, and their contents stay until the links are removed too.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import RunError
from hpc_rl.system.disk import explained
from hpc_rl.training.checkpoints import folders


@dataclass(frozen=True)
class Saved:
    """A checkpoint in the folder of a run, or held by a job."""

    step: int
    path: Path
    written: int
    """When, in ns. A run that resumes from an earlier step writes another checkpoint of the same step."""

    @property
    def key(self) -> tuple[int, int]:
        return self.step, self.written


def saved_in(folder: Path) -> dict[int, Saved]:
    """Return the checkpoints of a folder by step. Whether their files are complete is not checked."""
    found = {step: (path, _written(path)) for step, path in reversed(folders.numbered(folder))}
    return {step: Saved(step, path, written) for step, (path, written) in found.items() if written is not None}


def hold(saved: Saved, folder: Path) -> Path | None:
    """Link the files of a checkpoint into a folder, or copy them if they cannot be linked.

    Returns:
        the checkpoint there, complete; None if the run has removed it meanwhile.

    Raises:
        RunError: the files cannot be written.
    """
    held, partial = folder / saved.path.name, folder / f"{saved.path.name}.tmp"
    if _written(held) == saved.written:
        return held
    for old in (held, partial):
        shutil.rmtree(old, ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(saved.path, partial, symlinks=True, copy_function=_link)
        partial.rename(held)
    except OSError as error:  # of copytree, with all errors in one
        shutil.rmtree(partial, ignore_errors=True)
        if _written(saved.path) != saved.written:
            return None
        raise RunError(f"{held} could not be written: {explained(error, held)}") from error
    return held


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        if Path(source).lstat().st_uid in (0, os.geteuid()):  # a copy of another user's file would belong to this one
            shutil.copy2(source, target, follow_symlinks=False)


def _written(path: Path) -> int | None:
    try:
        return (path / folders.TRAINER).stat().st_mtime_ns
    except OSError:
        return None
