"""trainer.micro_tokens=auto of a job with pools: decided for all workers, and corrected after their first step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_spec
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.training.checkpoints.folders import Progress
from hpc_rl.training.rows import Decision, correct, decide

if TYPE_CHECKING:
    from hpc_rl.rl.actors.cluster import DriverConfig


def decide_rows(config: DriverConfig, groups: Collection[WorkerGroup], progress: Progress | None = None) -> Decision:
    """Decide what trainer.micro_tokens is, for workers that have loaded their models; print the decision.

    Args:
        progress: of the checkpoint from which the run resumes.
    """
    sizes = [pending.wait() for pending in [group.memory_bytes() for group in groups]]
    device = None if None in sizes else min(size for size in sizes if size is not None)
    ranks = sum(group.size for group in groups)
    rows = decide(config, device, ranks, progress and progress.micro_tokens)
    row_tokens = _use(config, groups, rows)
    print(rows.line or f"micro-batches of at most {row_tokens:,} tokens", flush=True)
    # The memory of an engine in the training processes is measured together with theirs, but planned apart.
    return replace(rows, is_corrected=True) if engine_spec(config).in_process else rows


def correct_rows(config: PpoConfig, rows: Decision, groups: Collection[WorkerGroup]) -> Decision:
    """Return the decision, corrected after the first step in which all models were updated."""
    if rows.is_corrected:
        return rows
    pools = {group.pool if config.pools.spec else "": group.max_memory_gb() for group in groups}
    measured = {pool: 1e9 * pending.wait() for pool, pending in pools.items()}
    longest = max(group.longest_row for group in groups)
    rows = correct(config, rows, -(-longest // config.trainer.sequence_parallel), measured)
    _use(config, groups, rows)
    if rows.line:
        print(rows.line, flush=True)
    return rows


def _use(config: DriverConfig, groups: Collection[WorkerGroup], rows: Decision) -> int:
    """Set the largest number of tokens of a row to what was decided, and return it."""
    row_tokens = rows.used_in(config).trainer.row_tokens
    for group in groups:
        group.row_tokens = row_tokens
    return row_tokens
