"""A checkpoint whose parts are being written by workers, and that the driver names when all are complete."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path

from hpc_rl.errors import RunError
from hpc_rl.training.checkpoints import folders, model_state
from hpc_rl.training.checkpoints.background import DEADLINE_S
from hpc_rl.training.checkpoints.folders import Progress

_POLL_S = 1.0
"""Time between two looks at the folder. Workers are busy with the next step and cannot report that they are done."""
_VISIBLE_S = 120
"""Time within which a network file system shows files of other nodes here."""
_REMOVAL_S = 240
"""Time in which old checkpoints may be removed before the run goes on. The next save removes what is left then."""


class Saving:
    """Watches the folder of a new checkpoint in a thread, and names the checkpoint as soon as all parts are written.

    Args:
        folder: the run's checkpoints.
        partial: folder of this checkpoint's parts.
        keep: number of checkpoints to keep.
    """

    def __init__(self, folder: Path, partial: Path, progress: Progress, keep: int) -> None:
        self._folder = folder
        self._partial = partial
        self._progress = progress
        self._keep = keep
        self._parts_are_written = threading.Event()
        self._lock = threading.Lock()
        """Guards the decision between naming the checkpoint and giving it up."""
        self._is_being_named = False
        self._is_given_up = False
        self._named: Future[Path] = Future()
        self._began = time.monotonic()
        self.seconds: float | None = None
        """Duration of the writing, after its end."""
        self._thread = threading.Thread(target=self._watch, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint has its name, or never will."""
        return self._named.done()

    def finish(self) -> None:
        """Name the checkpoint now, because the workers have reported that all parts are written. Then wait a while for
        the removal of old ones.

        Raises:
            RunError: the folder cannot be written, or not in time.
        """
        self._parts_are_written.set()
        self.wait(DEADLINE_S)
        self._thread.join(_REMOVAL_S)

    def wait(self, timeout_s: float, reason: str = "check the file system") -> None:
        """Wait until the checkpoint has its name.

        Args:
            reason: why it may never have one, or what to do then.

        Raises:
            RunError: it could not be written, or not in time.
        """
        if not wait_for([self._named], timeout_s).done:
            raise RunError(f"checkpoint {self._partial} was not written within {timeout_s:.0f} s: {reason}")
        self._named.result()

    def discard(self) -> None:
        """Give up, and remove what has been written. If all parts are written and the file system does not answer, they
        stay: the checkpoint may still get its name."""
        with self._lock:
            if not self.is_done and (self._is_being_named or self._has_all_parts()):
                return
            self._is_given_up = True
        folders.discard(self._folder, self._progress.step)

    def _has_all_parts(self) -> bool:
        try:
            return all(model_state.is_written(self._partial / part) for part in self._progress.parts)
        except OSError:  # a network file system may answer later; otherwise naming the checkpoint fails with the cause
            return False

    def _watch(self) -> None:
        reported_at = None
        while not self._has_all_parts():
            if self._is_given_up:
                return
            if reported_at is None:
                reported_at = time.monotonic() if self._parts_are_written.wait(_POLL_S) else None
            elif time.monotonic() - reported_at < _VISIBLE_S:
                time.sleep(_POLL_S)
            else:
                break
        with self._lock:
            if self._is_given_up:
                return
            self._is_being_named = True
        self.seconds = time.monotonic() - self._began
        try:
            self._named.set_result(folders.name(self._folder, self._progress))
        except RunError as error:
            self._named.set_exception(error)
            return
        folders.remove_old(self._folder, self._keep)
