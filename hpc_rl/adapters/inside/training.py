"""One training of a user's program, as all adapters inside programs see it: steps, checkpoints, an early end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hpc_rl.adapters.inside import beats
from hpc_rl.adapters.inside.agreement import RankGroup
from hpc_rl.adapters.inside.run import AdaptedRun
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.system.disk import own_disk


class Training:
    """Decides on all ranks alike when a training saves and ends, and records what it measures and saves.

    All ranks make it, and call `newest`, `ends_step` and `saved`, at the same points of the program.

    Args:
        part: names this training if a program has several, and their output folders do not.
    """

    def __init__(self, part: str = "") -> None:
        self.part = part
        self.ranks = RankGroup()
        self._run = AdaptedRun() if self.ranks.is_main else None
        self.is_stopping = False
        beats.begin(self.ranks.rank)

    def newest(self, output: str | None = None) -> Checkpoint | None:
        """Return the checkpoint to resume from, the same on all ranks.

        Args:
            output: the folder in which it has to be; None for any.
        """
        found: Checkpoint | None = self.ranks.of_main(self._run.newest(output, self.part) if self._run else None)
        if found and self._run:
            print(f"resuming from {found.path}", flush=True)
        return found

    def begins_step(self) -> None:
        """Note that the work of a step begins now."""
        if self._run:
            self._run.begin()

    def ends_step(self, step: int, total: int | None, tests: bool = False, boundary: int = 1) -> bool:
        """Return whether to save and end after this step, the same on all ranks.

        Args:
            total: the last step, after which a program ends by itself; None if it is not known.
            tests: whether the program evaluates before its next step.
            boundary: a resume is exact after steps that are a multiple of this; the walltime decides whether to wait.
        """
        is_due, is_last = False, total is not None and step >= total
        if is_last:
            beats.end()
        else:
            beats.begin_step(step + 1)
        if self._run:
            self._run.end_step(step, total or step)
            is_due = not is_last and self._run.is_due(tests, boundary)
        self.is_stopping = self.ranks.of_main(is_due)
        return self.is_stopping

    def has_time(self, tests: bool) -> bool:
        """Return whether one more step can be made, the same on all ranks."""
        return bool(self.ranks.of_main(self._run.has_time(tests) if self._run else None))

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write measurements of the current step."""
        if self._run:
            self._run.log(metrics)

    def tested(self, seconds: float) -> None:
        """Note the time of an evaluation."""
        if self._run:
            self._run.note_tested(seconds)

    def saved(self, step: int, path: Path, seconds: float, own: Path | None = None) -> None:
        """Record a checkpoint when all ranks have written their part, and end the process if it was the last one.

        What follows in the training and in the program is for the end of a run: it may delete this checkpoint, and
        export what looks like a finished model.

        Args:
            own: folder with the checkpoints of this training that only stops have written. This one replaces them.

        Raises:
            SystemExit: the run stops.
        """
        self.ranks.wait()
        if self._run:
            path = path.absolute()
            self._run.note_saved(Checkpoint(step, str(path), self.ranks.count, self.part), seconds)
            if own is not None:
                remove_replaced(own, path)
        if self.is_stopping:
            if self._run:
                print(self._run.stopped(), flush=True)
            raise SystemExit(EXIT_STOPPED)


def remove_replaced(folder: Path, newer: Path) -> None:
    """Remove the checkpoints of earlier stops if a newer checkpoint is on a disk that lasts as long as theirs."""
    if not newer.exists() or own_disk(newer) not in ("", own_disk(folder)):
        return
    for path in folder.glob("step-*.ckpt"):
        if path != newer.absolute():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
