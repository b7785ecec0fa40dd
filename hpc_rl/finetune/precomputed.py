"""What computations before training share: the log-probabilities of a reference, and a teacher's most probable tokens.

All ranks compute the results of the next items in rounds. Rank 0 stores them in the run directory now and then, so that
a run that resumes computes only the rest. A file is named after the number of its first result.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.data.lazy import LazyRows, Sizes
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.errors import RunError, UserError
from hpc_rl.system.disk import explained
from hpc_rl.system.files import folder_state, replacing
from hpc_rl.training import guards
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.stopping import Stopped, Stopping

_ROUND = 128
"""Items of each rank between two exchanges of results, in which the ranks also agree whether to stop."""
_STORE_EVERY_S = 300
"""Approximate time between two writes of the results so far."""
_STORE_BYTES = 256 << 20
"""Bytes of results after which they are stored earlier."""
_FORMAT = 2
"""Increase it if a change of this project changes results: those of earlier versions are then computed again."""
_VISIBLE_S = 90
"""Longest time in which a new file is seen on all nodes. NFS may remember for a minute that there was none."""
T = TypeVar("T")
Results = NDArray[Any]
"""Results of some items, one after the other. An item has one or more; the type of a result has fields."""


class WithResults(LazyRows[T]):
    """Items with stored results.

    Args:
        bounds: number of stored results before each item, and before the first one that follows.
        parts: all stored results; a part has those of whole items.
        add: returns an item with its results.
    """

    def __init__(
        self,
        items: Sequence[T],
        bounds: NDArray[np.int64],
        parts: Sequence[Results],
        add: Callable[[T, Results], T],
    ) -> None:
        self._items, self._bounds, self._parts, self._add = items, bounds, parts, add
        self._part_ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return len(self._items)

    def row(self, index: int) -> T:
        """Return an item; its results are read from disk."""
        start, end = self._bounds[index : index + 2].tolist()
        number = int(np.searchsorted(self._part_ends, start, side="right"))
        before = int(self._part_ends[number]) - len(self._parts[number])
        return self._add(self._items[index], self._parts[number][start - before : end - before])


def with_results(
    what: str,
    folder: Path,
    dtype: np.dtype[Any],
    train: Sequence[T],
    val: Sequence[T],
    bounds: NDArray[np.int64],
    compute: Callable[[int], Iterator[Results]],
    add: Callable[[T, Results], T],
    world: World,
    stopping: Stopping,
) -> tuple[WithResults[T], WithResults[T]]:
    """Return the items with their results. Compute and store those that are missing. Every rank calls this.

    Args:
        what: names the results in messages.
        folder: of these results alone; see `results_key`.
        bounds: number of results before each item of `train` and `val`, and of all.
        compute: yields the results of the next items, from the item of this number on, until there are all. Every rank
            gets those of all ranks.
        add: returns an item with its results.

    Raises:
        Stopped: the run stops before all are known.
    """
    total = int(bounds[-1])
    known = int(world.broadcast(sum(map(len, stored(folder, dtype))) if world.is_main else None))
    if known < total:
        began = time.monotonic()
        with guards.explain_out_of_memory(what):
            _complete(what, folder, bounds, known, compute, world, stopping)
        gc.collect()  # sharded models are reference cycles
        if world.on_accelerator:
            torch.accelerator.empty_cache()
        if world.is_main:
            print(f"{what} are in {folder}, computed in {time.monotonic() - began:.0f} s", flush=True)
    parts = world.together(lambda: _all_stored(what, folder, dtype, total))
    return WithResults(train, bounds[: len(train) + 1], parts, add), WithResults(val, bounds[len(train) :], parts, add)


def _complete(
    what: str,
    folder: Path,
    bounds: NDArray[np.int64],
    known: int,
    compute: Callable[[int], Iterator[Results]],
    world: World,
    stopping: Stopping,
) -> None:
    """Compute and store what follows the first results, which are known."""
    waiting: list[Results] = []
    stored_at = began = time.monotonic()
    longest_s = 0.0
    for results in compute(_items(bounds, known)):
        waiting.append(results)
        computed = known + sum(map(len, waiting))
        now = time.monotonic()
        longest_s, began = max(longest_s, now - began), now
        stopping.made_a_step = True
        is_due = now - stored_at > _STORE_EVERY_S or sum(part.nbytes for part in waiting) > _STORE_BYTES
        wishes = [world.is_main and stopping.due(longest_s), is_due]
        stops, stores = world.gather_rows(list(map(float, wishes)))[0].tolist()  # rank 0 decides
        if not (stops or stores or computed == bounds[-1]):
            continue
        part = np.concatenate(waiting)
        world.together(lambda part=part, known=known: _write(folder, known, part) if world.is_main else None)
        stored_at, known = now, computed
        waiting.clear()
        if stops:
            raise Stopped(
                f"stopped before the first step: {what} are stored for {_items(bounds, known):,} of "
                f"{len(bounds) - 1:,} samples or pairs"
            )


def _items(bounds: NDArray[np.int64], results: int) -> int:
    """Return how many items have so many results."""
    return int(np.searchsorted(bounds, results, side="right")) - 1


def rounds(sizes: Sizes, first: int, world: World) -> Iterator[tuple[int, Sizes]]:
    """Yield the number of each round's first item, and the sizes of its items.

    Args:
        sizes: of all items.
        first: number of the first item without results.
    """
    step = _ROUND * world.size
    for start in range(first, len(sizes.lengths), step):
        yield start, sizes.at(slice(start, start + step))


def results_key(path: str, settings: Sequence[object], samples: Iterable[Sample]) -> str:
    """Return a name that is equal for equal models and equal data.

    Args:
        path: folder or hub name of the model.
        settings: what else its results depend on, as JSON can write it.
    """
    digest = hashlib.sha256(json.dumps([_FORMAT, path, folder_state(Path(path)), *settings]).encode())
    for sample in samples:
        digest.update(len(sample.input_ids).to_bytes(8))
        digest.update(np.ascontiguousarray(sample.input_ids, np.int32).data)
        digest.update(np.packbits(sample.loss_mask).data)
    return digest.hexdigest()[:16]


def stored(folder: Path, dtype: np.dtype[Any]) -> list[Results]:
    """Return the results of the first items, without those after a damaged file. They are not read into memory."""
    parts: list[Results] = []
    while True:
        try:
            part = np.lib.format.open_memmap(folder / f"{sum(map(len, parts))}.npy", mode="r")
        except (OSError, EOFError, ValueError):
            return parts
        if part.dtype != dtype or not len(part):
            return parts
        parts.append(part.view(np.ndarray))


def _all_stored(what: str, folder: Path, dtype: np.dtype[Any], count: int) -> list[Results]:
    """Return all results.

    Raises:
        UserError: a file that was written is not there after some time.
    """
    deadline = time.monotonic() + _VISIBLE_S
    while (found := sum(map(len, parts := stored(folder, dtype)))) != count:
        if time.monotonic() > deadline:
            raise UserError(
                f"{folder} has {found:,} instead of {count:,} results ({what}): check that all nodes see the same run "
                "directory, delete this folder and start the run again"
            )
        time.sleep(0.5)
    return parts


def _write(folder: Path, first: int, part: Results) -> None:
    path = folder / f"{first}.npy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("xb") as file:
            np.save(file, part)
    except OSError as error:
        raise RunError(f"{path} could not be written: {explained(error, path)}") from error
