"""The checks on torchrun's ranks: python -m hpc_rl.probes.acceptance.on_ranks --device cuda ...

All ranks run each check together. If a rank fails in any other way than by a UserError, it exits, and the node's entry
starts the others again for the next check.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial

import torch

from hpc_rl.probes.acceptance.bench import Bench
from hpc_rl.probes.acceptance.session import CheckSession, attempt, error_file, function_of, parse, words_of
from hpc_rl.probes.acceptance.table import rows
from hpc_rl.training.parallel import distributed
from hpc_rl.training.parallel.distributed import World

START_TIMEOUT_S = 300


def main(argv: Sequence[str]) -> None:
    """Run all checks that are left. Exits with code 1 at once if a check breaks this process."""
    session = parse(argv)
    try:
        run(session)
    except Exception as error:  # noqa: BLE001 - the outermost handler: whatever a check raises is its result
        traceback.print_exc()
        error_file(session.folder).write_text(words_of(error))
        sys.stderr.flush()
        os._exit(1)  # without the interpreter's clean-up, which could wait for other ranks
    distributed.finish()


def run(session: CheckSession) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    world = distributed.start(session.layout.device, START_TIMEOUT_S)
    if world.is_main:
        session.plan()
    world.barrier()
    bench = Bench.here(session.layout, session.folder)
    left = world.broadcast([row.name for row in session.left("torchrun")] if world.is_main else None)
    for row in [row for row in rows(session.layout) if row.name in left]:
        began = time.monotonic()
        if world.is_main:
            session.begin(row)
        blocked = world.broadcast(session.blocked(row) if world.is_main else None)
        check = partial(function_of(row), bench, world, row.variant)
        mine = ("skipped", blocked) if blocked else attempt(check)
        outcome = agreed(mine, world)
        if world.is_main:
            session.end(row, outcome, time.monotonic() - began)
        free_memory(world)


def agreed(mine: tuple[str, str], world: World) -> tuple[str, str]:
    """Return the outcome of all ranks: the first failure, else the first skip, else rank 0's."""
    everyone: list[tuple[str, str]] = [(state, words) for state, words in world.gather(mine)]
    for state in ("failed", "skipped"):
        for rank, (found, words) in enumerate(everyone):
            if found == state:
                alike = all(other == (found, words) for other in everyone)
                return state, words if alike else f"rank {rank}: {words}"
    return everyone[0]


def free_memory(world: World) -> None:
    """Free what a check has left, before the next one measures its memory."""
    gc.collect()
    if world.device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


if __name__ == "__main__":
    main(sys.argv[1:])
