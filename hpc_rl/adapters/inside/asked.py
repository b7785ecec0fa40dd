"""Whether the run has to stop, for programs that are ended once they have saved (hpc_rl/node/adapted.py)."""

from __future__ import annotations

from hpc_rl.adapters.inside.run import run_of_process


class SaveOnce:
    """Asks a program for one checkpoint after the run has to stop. A second one could be cut off when it is ended."""

    def __init__(self) -> None:
        self._has_saved = False

    def is_due(self) -> bool:
        """Return whether to save now. The checkpoint is expected after that."""
        is_due = not self._has_saved and is_asked()
        self._has_saved |= is_due
        return is_due


def is_asked() -> bool:
    """Return whether the stop file is there."""
    return run_of_process().stop.exists()
