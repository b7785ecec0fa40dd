"""Training runs in this process, and jobs of several processes the way a launcher starts them."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rl.finetune import trainer
from hpc_rl.finetune.train import parse
from hpc_rl.finetune.trainer import train
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.metrics import read_metrics
from hpc_rl.training.parallel import distributed, sharding
from hpc_rl.training.parallel.distributed import World
from tests.finetune.forked import SETTINGS, Forked

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
Result = tuple[int, str, str]


def arguments(base: Sequence[str], run_dir: Path, *overrides: str) -> list[str]:
    return ["--run-dir", str(run_dir), *base, *overrides]


def run_here(base: Sequence[str], run_dir: Path, *overrides: str) -> int:
    """One rank, in this process: quick. Its exit code."""
    return train(*parse(arguments(base, run_dir, *overrides)), ALONE)


def run_job(base: Sequence[str], run_dir: Path, *overrides: str, ranks: int = 1, **environ: str) -> list[Result]:
    """Processes as a launcher starts them; (exit code, stdout, stderr) of each rank."""
    return spawn(["-m", "hpc_rl.finetune.train", *arguments(base, run_dir, *overrides)], ranks, **environ)


def run_stopped(
    runs: Sequence[tuple[Sequence[str], Path, Sequence[str]]], micro_batch: int, ranks: int
) -> list[Result]:
    """Like `run_several`; a run is asked to stop when rank 0 begins this micro-batch, counted from 0 over all steps."""
    command = [__file__, json.dumps([arguments(*one[:2], *one[2]) for one in runs]), str(micro_batch)]
    return spawn(command, ranks, timeout=600)


def ask_at(patch: pytest.MonkeyPatch, run: RunDir, micro_batch: int) -> None:
    """Write the stop file when this micro-batch begins, and let the ranks agree after each one."""
    begin, begun = sharding.begin_micro_batch, itertools.count()

    def begin_and_ask(*arguments: Any, **named: Any) -> None:
        if next(begun) == micro_batch:
            run.stop.write_text("user\n")
        begin(*arguments, **named)

    patch.setattr(sharding, "begin_micro_batch", begin_and_ask)
    patch.setattr(trainer, "_ASK_EVERY_S", 0)


def run_several(
    runs: Sequence[tuple[Sequence[str], Path, Sequence[str]]],
    ranks: int,
    ranks_per_node: int | None = None,
    timeout: float = 600,
) -> list[Result]:
    """Several runs one after the other in the same processes, which saves their start; they print their exit codes."""
    command = [__file__, json.dumps([arguments(base, path, *more) for base, path, more in runs])]
    return spawn(command, ranks, timeout, ranks_per_node)


def spawn(
    command: Sequence[str], ranks: int, timeout: float = 600, ranks_per_node: int | None = None, **environ: str
) -> list[Result]:
    """Run `python COMMAND...` on these ranks, with these variables too; see `run_job`."""
    torchrun = {"WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    if ranks_per_node is not None:
        torchrun["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    with tempfile.TemporaryDirectory(prefix="group-") as group:
        folders = [Path(group, f"output-{rank}") for rank in range(ranks)]
        for folder in folders:
            folder.mkdir()
        if torchrun:
            torchrun["HPC_RL_GROUP_DIR"] = group
        processes = [
            Forked(
                command,
                {
                    **{**os.environ, **SETTINGS, **environ, **torchrun},
                    **({"RANK": rank, "LOCAL_RANK": rank} if torchrun else {}),
                },
                folder,
            )
            for rank, folder in zip(map(str, range(ranks)), folders, strict=True)
        ]
        try:
            return [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()


def series(run_dir: Path, name: str) -> list[float]:
    """One metric of all steps that have it."""
    return [record[name] for record in read_metrics(run_dir / "metrics.jsonl") if name in record]


if __name__ == "__main__":
    world = distributed.start("cpu", start_timeout_s=600)
    codes = []
    for each in json.loads(sys.argv[1]):
        config, run = parse(each)
        with pytest.MonkeyPatch.context() as patch:
            if len(sys.argv) > 2:
                ask_at(patch, run, int(sys.argv[2]) if world.is_main else -1)
            codes.append(train(config, run, world))
    print("exit codes", *codes)
    distributed.finish()
