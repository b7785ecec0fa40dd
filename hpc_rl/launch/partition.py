"""Whether the partition can ever start the job: what would otherwise wait in the queue for ever."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_rl.config.schema import JobConfig
from hpc_rl.config.slurm import memory_mb, walltime_s
from hpc_rl.errors import UserError
from hpc_rl.launch.resource_request import asks_for_gpus, cpus_per_node, memory_per_node
from hpc_rl.slurm import commands
from hpc_rl.slurm.capacity import Need, refusal
from hpc_rl.slurm.detect import NodeGroup


def check_partition(config: JobConfig) -> str | None:
    """One look at sinfo, where there is a Slurm.

    Returns:
        Why it could not be checked.

    Raises:
        UserError: the partition has no such nodes, or ends jobs earlier; it says what there is.
    """
    slurm = config.slurm
    if not commands.available() or slurm.sbatch.keys() & {"clusters", "reservation"}:
        return None
    try:
        groups = commands.node_groups()
    except commands.NoAnswer as error:
        return f"partition {slurm.partition or '(default)'} is not checked: {error}"
    if problem := refusal(groups, slurm.partition, _need(config)) or _too_long(groups, config):
        raise UserError(problem)
    return None


def _need(config: JobConfig) -> Need:
    return Need(
        nodes=config.trainer.nnodes,
        gpus=config.trainer.n_gpus_per_node if config.trainer.device == "cuda" else 0,
        gpu_type=config.slurm.gpu_type if asks_for_gpus(config) else None,
        cpus=cpus_per_node(config),
        memory_mb=memory_mb(memory_per_node(config) or "0") or 0,
    )


def _too_long(groups: Sequence[NodeGroup], config: JobConfig) -> str | None:
    slurm = config.slurm
    if slurm.time is None or slurm.qos is not None:  # a quality of service may have a limit of its own
        return None
    names = slurm.partition.split(",") if slurm.partition else [group.partition for group in groups if group.is_default]
    limits = {group.partition: group.time_limit for group in groups if group.partition in names}
    seconds = [walltime_s(limit) for limit in limits.values()]
    asked = walltime_s(slurm.time)
    if not limits or any(limit is None or (asked is not None and asked <= limit) for limit in seconds):
        return None
    said = " and ".join(f"partition {name} ends jobs after {limit}" for name, limit in limits.items())
    return f"{said}, and {slurm.time} is asked for: lower --time; a run goes on by itself in the next job"
