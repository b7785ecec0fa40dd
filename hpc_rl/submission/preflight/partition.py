"""Checks of the partition, so that no job waits in the queue forever for resources that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_rl.config.job import JobConfig
from hpc_rl.config.slurm import memory_mb, walltime_s
from hpc_rl.errors import UserError
from hpc_rl.slurm import commands
from hpc_rl.slurm.capacity import Need, refusal
from hpc_rl.slurm.cluster import NodeGroup
from hpc_rl.slurm.place import is_single
from hpc_rl.submission.resources import asks_for_gpus, cpus_per_node, memory_per_node


@dataclass(frozen=True)
class PartitionRequest:
    """The request that a partition has to be able to grant. All runs of a sweep have the same request."""

    partition: str | None
    need: Need
    time: str | None
    """Walltime; None if it cannot be compared with the limit of the partition."""
    has_qos: bool = False
    """Whether it has a quality of service, which may have limits of its own."""
    clusters: str = ""
    """The cluster; empty for the local one."""


def partition_request(config: JobConfig) -> PartitionRequest | None:
    """Return the request of a job; None if its nodes come from one of several clusters, or from a reservation."""
    slurm = config.slurm
    if "reservation" in slurm.sbatch or not is_single(slurm.clusters):
        return None
    time = None if slurm.qos is not None else slurm.time  # a quality of service may have a limit of its own
    return PartitionRequest(slurm.partition, _need(config), time, slurm.qos is not None, slurm.clusters)


def check_partition(ask: PartitionRequest, nodes: commands.NodeListing) -> str | None:
    """Compare the request with the nodes and time limits that sinfo shows, if Slurm is installed.

    Returns:
        Why it could not be checked, if so.

    Raises:
        UserError: the partition has no such nodes, or a shorter time limit; the message states both.
    """
    if not commands.available():
        return None
    try:
        groups = nodes.groups(ask.clusters)
    except commands.NoAnswer as error:
        return f"partition {ask.partition or '(default)'} is not checked: {error}"
    if problem := refusal(groups, ask.partition, ask.need, ask.has_qos) or _too_long(groups, ask):
        raise UserError(problem)
    return None


def _need(config: JobConfig) -> Need:
    return Need(
        nodes=config.trainer.nnodes,
        gpus=config.trainer.n_gpus_per_node if config.trainer.uses_gpus else 0,
        gpu_type=config.slurm.gpu_type if asks_for_gpus(config) else None,
        cpus=cpus_per_node(config),
        memory_mb=memory_mb(memory_per_node(config) or "0") or 0,
    )


def _too_long(groups: Sequence[NodeGroup], ask: PartitionRequest) -> str | None:
    if ask.time is None:
        return None
    names = ask.partition.split(",") if ask.partition else [group.partition for group in groups if group.is_default]
    limits = {group.partition: group.time_limit for group in groups if group.partition in names}
    seconds = [walltime_s(limit) for limit in limits.values()]
    asked = walltime_s(ask.time)
    if not limits or any(limit is None or (asked is not None and asked <= limit) for limit in seconds):
        return None
    limits_text = " and ".join(f"partition {name} ends jobs after {limit}" for name, limit in limits.items())
    return f"{limits_text}, and --time is {ask.time}: lower it; the run resumes in another job after each walltime"
