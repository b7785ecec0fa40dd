"""A worker that can be alone in a collective; a file of its own, since an actor's process imports its class's file."""

from __future__ import annotations

from hpc_rl.liveness.heartbeat import beats_in_calls
from hpc_rl.rl.workers.worker import Worker


@beats_in_calls
class LoneRank(Worker):
    def meet_others(self) -> None:
        """Wait for all ranks of the pool."""
        self.world.barrier()
