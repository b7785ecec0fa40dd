"""Saving and resuming with worker groups: actor and critic are parts of a checkpoint, and workers write and read them.

The driver names a checkpoint as soon as all parts are written. Workers are busy with the next step then, and Ray runs
their calls in order, so that they cannot report: a thread of the driver watches the folder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from hpc_rl.errors import RunError
from hpc_rl.rl.actors.calls import has_died
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.training.checkpoints import model_state
from hpc_rl.training.checkpoints.background import DEADLINE_S
from hpc_rl.training.checkpoints.folders import ACTOR, CRITIC
from hpc_rl.training.checkpoints.saver import TrainedModels
from hpc_rl.training.parallel.distributed import World

_POLL_S = 1.0
"""Time between two looks at the folder."""
_VISIBLE_S = 120
"""Time within which a network file system shows files of other nodes here."""
_AFTER_DEATH_S = 30
"""Time for the other parts of a checkpoint, after a process that wrote one has died."""


class WorkerModels(TrainedModels):
    """Actor and critic, in the processes of worker groups."""

    def __init__(self, actor: WorkerGroup, critic: WorkerGroup | None) -> None:
        self._groups = {ACTOR: actor} | ({CRITIC: critic} if critic else {})
        self.names = tuple(self._groups)
        self._on_disk: PartsOnDisk | None = None

    def begin(self, partial: Path, copy: bool) -> Callable[[World], None]:
        """Let the workers begin to save. Whether they copy their models is an option (trainer.save_async)."""
        for pending in [group.save(role, partial / role) for role, group in self._groups.items()]:
            pending.wait()
        self._on_disk = on_disk = PartsOnDisk([partial / role for role in self._groups])
        return lambda _: on_disk.wait()

    def read(self, path: Path) -> None:
        """Let the workers load the models of a checkpoint."""
        for pending in [group.load(role, path / role) for role, group in self._groups.items()]:
            pending.wait()

    def await_reports(self) -> None:
        """Wait until the workers have reported that they have written their models."""
        for pending in [group.saved(role) for role, group in self._groups.items()]:
            pending.wait(DEADLINE_S)
        if self._on_disk is not None:
            self._on_disk.end()

    def patience(self) -> tuple[float, str]:
        """Return how long to wait for the parts. That of a process that has died may be complete."""
        writing = [group.saved(role) for role, group in self._groups.items()]
        if has_died([call for one in writing for call in one.calls]):
            return _AFTER_DEATH_S, "a process that wrote a part of it has died"
        return super().patience()

    def give_up(self) -> None:
        """End the thread that waits for the parts."""
        if self._on_disk is not None:
            self._on_disk.end(failed=True)


class PartsOnDisk:
    """Waits in a thread for parts of a checkpoint that other processes write."""

    def __init__(self, parts: list[Path]) -> None:
        self._parts = parts
        self._has_ended = threading.Event()
        self._failed = False

    def end(self, failed: bool = False) -> None:
        """Note that nothing is being written any more."""
        self._failed = failed
        self._has_ended.set()

    def wait(self) -> None:
        """Wait until all parts are written, or nothing is being written any more. What is missing then is reported by
        the function that names the checkpoint.

        Raises:
            RunError: a part could not be written.
        """
        ended_at = None
        while True:
            failed = self._failed  # read first: parts that were complete before the failure count
            if self._are_complete():
                return
            if failed:
                raise RunError("a part of it could not be written")
            if ended_at is None:
                ended_at = time.monotonic() if self._has_ended.wait(_POLL_S) else None
            elif time.monotonic() - ended_at < _VISIBLE_S:
                time.sleep(_POLL_S)
            else:
                return

    def _are_complete(self) -> bool:
        try:
            return all(model_state.is_written(part) for part in self._parts)
        except OSError:  # a network file system may answer later; otherwise naming the checkpoint fails with the cause
            return False
