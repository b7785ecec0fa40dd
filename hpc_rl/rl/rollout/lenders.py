"""What a RequestQueue asks about engines that other jobs lend to the run."""

from __future__ import annotations

from typing import Protocol

from hpc_rl.rl.actors.calls import ActorCall


class Lenders(Protocol):
    """Where engines come from that other jobs lend to the run. They may leave at any time."""

    stall_s: float
    """A lent engine that does not answer for so long is ended."""

    def look(self) -> None:
        """Admit engines that have come (`RequestQueue.admit`). Called in each turn."""

    def next_call(self, engine: int) -> ActorCall | None:
        """Return the next call that an engine needs before it gets requests. None: it needs none, and `restore` was
        called; or it waits for the next weights."""

    def left(self, engine: int, error: Exception | None, repeated: int, continued: int) -> None:
        """Note that an engine has ended.

        Args:
            error: None if its node leaves.
            repeated: its requests that are generated again from their beginning.
            continued: those that others continue.
        """
