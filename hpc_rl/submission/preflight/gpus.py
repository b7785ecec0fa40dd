"""Checks of GPUs that work together: slices of GPUs, and memory that several processes use."""

from __future__ import annotations

import os
import re

from hpc_rl.config.job import JobConfig
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.config.rl.pools import pool_of, pool_spec
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_spec
from hpc_rl.errors import UserError
from hpc_rl.software.environment import refuse_expandable_segments
from hpc_rl.submission.script.environment import job_environment


def connected_gpus(config: JobConfig) -> int:
    """Return the number of GPUs of a node that NCCL connects; at most 1 if it connects none, or if this is unknown.

    The user's own Ray program may use its GPUs one by one, as engines without tensor parallelism do.
    """
    if isinstance(config, PpoConfig | GenerateConfig):
        spec = pool_spec(config)
        pools = {pool_of(config, role) for role in config.roles if role != "rollout"}
        most = max((n for name in pools for n in spec[name]), default=1)
        if isinstance(config, PpoConfig) and sends_by(config, "nccl"):
            most += 1  # a trainer and an engine
        return min(max(most, config.rollout.tensor_parallel_size), config.trainer.n_gpus_per_node)
    return 1 if isinstance(config, RayJobConfig) else config.trainer.n_gpus_per_node


def sends_by(config: PpoConfig, transfer: str) -> bool:
    """Return whether weights go from the trainer's GPUs to engines by a transfer of vLLM: ipc or nccl.

    `hpc_rl.rl.weights.transfers` makes the same choice in the job.
    """
    shared = pool_of(config, "rollout") == pool_of(config, "actor")
    fits = config.trainer.computes_on == "cuda" and config.rollout.merge_lora and shared == (transfer == "ipc")
    return fits and transfer in engine_spec(config).transfers


def check_slices(gpu_type: str, connected: int) -> None:
    """Raise UserError if NCCL would have to connect slices of GPUs.

    Args:
        connected: see `connected_gpus`.
    """
    if re.search(r"\dg\.\d+gb", gpu_type):
        raise UserError(
            f"slurm.gpu_type {gpu_type} is a slice of a GPU (MIG), and {connected} processes of a node exchange "
            "tensors: NCCL cannot connect two slices of one GPU; use one process per node (--gpus-per-node 1), or "
            "whole GPUs"
        )


def allocator_variables(config: JobConfig) -> tuple[tuple[str, str], ...]:
    """Return the variables of torch's allocator in a job: of this shell, of options, and of exports in slurm.setup."""
    exports = re.findall(r"\b(PYTORCH_\w+)=[\"']?([^\"'\s;]*)", "\n".join(config.slurm.setup))
    environ = {**os.environ, **job_environment(config), **dict(exports)}
    return tuple(item for item in environ.items() if item[0].startswith("PYTORCH_"))


def check_allocator(*environ: tuple[str, str]) -> None:
    """Raise UserError if engines cannot read the weights of the trainer on their GPU."""
    refuse_expandable_segments(dict(environ))
