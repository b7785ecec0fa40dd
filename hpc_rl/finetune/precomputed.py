"""What computations before training share: the log-probabilities of a reference, and a teacher's most probable tokens.

All ranks compute the results of the next items in rounds. Rank 0 stores them now and then, so that a run that resumes
computes only the rest.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from hpc_rl.data.lazy import Sizes
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.system.files import folder_state
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.stopping import Stopping

_ROUND = 128
"""Items of each rank between two exchanges of results, in which the ranks also agree whether to stop."""
_STORE_EVERY_S = 300
"""Approximate time between two writes of the results so far."""


def rounds(sizes: Sizes, first: int, world: World) -> Iterator[tuple[int, Sizes]]:
    """Yield the number of each round's first item, and the sizes of its items.

    Args:
        sizes: of all items.
        first: number of the first item without results.
    """
    step = _ROUND * world.size
    for start in range(first, len(sizes.lengths), step):
        yield start, sizes.at(slice(start, start + step))


class Pace:
    """Decides after each round, for all ranks, whether to store the results and whether to stop."""

    def __init__(self, world: World, stopping: Stopping) -> None:
        self._world, self._stopping = world, stopping
        self._stored_at = self._began = time.monotonic()
        self._longest_s = 0.0

    def after_round(self, is_last: bool, is_full: bool = False) -> tuple[bool, bool]:
        """Return whether to store the results, and whether to stop after that. Every rank calls this.

        Args:
            is_last: whether all results are known.
            is_full: whether the results that are not stored take much memory.
        """
        now = time.monotonic()
        self._longest_s, self._began = max(self._longest_s, now - self._began), now
        self._stopping.made_a_step = True
        is_due = is_full or now - self._stored_at > _STORE_EVERY_S
        wishes = [self._world.is_main and self._stopping.due(self._longest_s), is_due]
        stops, stores = self._world.gather_rows(list(map(float, wishes)))[0].tolist()  # rank 0 decides
        if not (stops or stores or is_last):
            return False, False
        self._stored_at = now
        return True, bool(stops)


def free_memory(world: World) -> None:
    """Free what the computation has taken, before the model is loaded. Sharded models are reference cycles."""
    gc.collect()
    if world.on_accelerator:
        torch.accelerator.empty_cache()


def results_key(path: str, settings: Sequence[object], samples: Iterable[Sample]) -> str:
    """Return a text that is equal for equal models and equal data.

    Args:
        path: folder or hub name of the model.
        settings: what else its results depend on, as JSON can write it.
    """
    digest = hashlib.sha256(json.dumps([path, folder_state(Path(path)), *settings]).encode())
    for sample in samples:
        digest.update(len(sample.input_ids).to_bytes(8))
        digest.update(np.ascontiguousarray(sample.input_ids, np.int32).data)
        digest.update(np.packbits(sample.loss_mask).data)
    return digest.hexdigest()
