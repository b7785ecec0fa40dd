"""torchrun for the ranks of one node, without a network port.

    python -m hpc_rl.node.agent --rdzv-backend=local ... PROGRAM      (torchrun's options)

The agents of several nodes usually meet in a TCPStore, which listens on all interfaces and trusts everyone who
connects. Here each agent is alone: Slurm has numbered the nodes, and `hpc_rl.node.rank` numbers the ranks. This file
imports torch, in its own process.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch.distributed import HashStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of an agent that is alone. Its store is in its own memory."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return "local"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, and the address at which rank 0 of the program may open a store of its own."""
        address = RendezvousStoreInfo(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _make(parameters: RendezvousParameters) -> Any:
    return LocalRendezvous(parameters.run_id)


if __name__ == "__main__":
    rendezvous_handler_registry.register("local", _make)
    run.main(sys.argv[1:])
