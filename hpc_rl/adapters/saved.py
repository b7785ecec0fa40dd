"""saved.jsonl of a run: the checkpoints that a user's program has completed, as the adapter inside it records them.

A checkpoint is in it when all its files are written, so the next attempt never resumes from half of one, or from one of
another run in the same output folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_rl.run_dir import RunDir
from hpc_rl.system.files import LineFile, read_regular


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: str
    processes: int = 0
    """Number of processes that wrote it; 0 if it is not known."""
    part: str = ""
    """The training of the program, if it has several that share a folder."""


def record_saved(run: RunDir, checkpoint: Checkpoint) -> None:
    """Add a checkpoint that is complete."""
    LineFile(run.saved).write(json.dumps(asdict(checkpoint)))


def newest_saved(
    run: RunDir,
    output: Path | None = None,
    part: str | None = None,
    exists: Callable[[str], bool] = os.path.exists,  # it raises no error
) -> Checkpoint | None:
    """Return the last checkpoint that this run has completed, that still exists, and that no other training of the
    program has overwritten.

    Args:
        output: the folder in which it is; None for any.
        part: the training that wrote it; None for any.
        exists: returns whether the path of a checkpoint exists.
    """
    try:
        lines = read_regular(run.saved).splitlines()
    except OSError:
        return None
    writers: dict[str, str] = {}
    for line in reversed(lines):
        try:
            found = Checkpoint(**json.loads(line))
        except (ValueError, TypeError):
            continue
        path = Path(found.path)
        is_whole = writers.setdefault(found.path, found.part) == found.part
        is_here = output is None or path.absolute().parent == output.absolute()
        if is_whole and is_here and part in (None, found.part) and exists(found.path):
            return found
    return None
