"""What the ranks of a program agree on at each step, on CPUs, so that no GPU is waited for."""

from __future__ import annotations

import atexit
from datetime import timedelta
from typing import Any

LONGEST = timedelta(days=7)
"""How long ranks wait for each other here. How long the program itself may wait decides before."""


def _end(group: Any) -> None:
    """End a group of gloo before Python ends, because its threads could abort the process; also a program's own."""
    import torch.distributed as dist

    if dist.is_initialized():  # otherwise the program has ended all of them
        dist.destroy_process_group(None if dist.get_backend() == dist.Backend.GLOO else group)


class RankGroup:
    """The processes of a program, if it has made a process group of torch; otherwise this process alone.

    All of them make this object, and call its functions, at the same points of the program.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        is_group = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_group else 0
        self.count = dist.get_world_size() if is_group else 1
        self._group = dist.new_group(backend="gloo", timeout=LONGEST) if self.count > 1 else None
        if self._group is not None:
            atexit.register(_end, self._group)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Wait for all ranks."""
        import torch.distributed as dist

        if self._group is not None:
            dist.barrier(group=self._group)

    def of_main(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        import torch.distributed as dist

        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def all(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on all ranks."""
        import torch.distributed as dist

        values = [value] * self.count
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values
