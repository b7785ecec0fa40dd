"""A checkpoint whose parts are being written by workers, and that the driver names when all are complete."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path

from hpc_rl.errors import RunError
from hpc_rl.training.checkpoints import folders, model_state
from hpc_rl.training.checkpoints.folders import Progress

_POLL_S = 1.0
"""Time between two looks at the folder. Workers are busy with the next step and cannot report that they are done."""
_VISIBLE_S = 120
"""Time within which a network file system shows files of other nodes here."""


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
        self._is_given_up = threading.Event()
        self._named: Future[Path] = Future()
        self._began = time.monotonic()
        self.seconds: float | None = None
        """Duration of the writing, after its end."""
        threading.Thread(target=self._watch, name="checkpoint", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint has its name, or never will."""
        return self._named.done()

    def finish(self) -> None:
        """Name the checkpoint now, because the workers have reported that all parts are written.

        Raises:
            RunError: the folder cannot be written.
        """
        self._parts_are_written.set()
        self.wait(2 * _VISIBLE_S)

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
        """Give up, and remove what has been written."""
        self._is_given_up.set()
        folders.discard(self._folder, self._progress.step)

    def _watch(self) -> None:
        reported_at = None
        while not all(model_state.is_written(self._partial / part) for part in self._progress.parts):
            if self._is_given_up.is_set():
                return
            if reported_at is None:
                reported_at = time.monotonic() if self._parts_are_written.wait(_POLL_S) else None
            elif time.monotonic() - reported_at < _VISIBLE_S:
                time.sleep(_POLL_S)
            else:
                break
        self.seconds = time.monotonic() - self._began
        try:
            self._named.set_result(folders.commit(self._folder, self._progress, self._keep))
        except RunError as error:
            self._named.set_exception(error)
