"""The resources that a job requests on each node, as options of sbatch. Pure functions of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from hpc_rl.config.job import JobConfig
from hpc_rl.config.slurm import SlurmConfig, memory_mb

Directive = tuple[str, str | int | None]
_GPU_OPTIONS = {"gpus", "gpus-per-node", "gpus-per-task"}
_GPU_GRES = {"gpu", "npu", "xpu"}
"""Names that sites give to generic resources with accelerators."""
_MEMORY_OPTIONS = {"mem-per-cpu", "mem-per-gpu"}


def resource_directives(config: JobConfig) -> Iterator[Directive]:
    """Yield sbatch's options for CPUs, GPUs, memory and whole nodes."""
    slurm, trainer = config.slurm, config.trainer
    if slurm.cpus_per_task or "cpus-per-gpu" not in slurm.sbatch:
        yield "cpus-per-task", cpus_per_node(config)
    if asks_for_gpus(config):
        if slurm.gpu_option == "gpus-per-task":
            yield "ntasks", trainer.nnodes  # this option requires an explicit number of tasks (sbatch(1))
        yield slurm.gpu_option, _gpu_value(slurm, trainer.n_gpus_per_node)
    yield from _memory(config)
    if slurm.exclusive and "exclusive" not in slurm.sbatch:
        yield "exclusive", None


def further_directives(slurm: SlurmConfig) -> Iterator[Directive]:
    """Yield the user's own sbatch options, except a gres without GPUs if it is already part of the gres for GPUs."""
    for option, value in slurm.sbatch.items():
        if option != "gres" or _names_gpus(value) or slurm.gpu_option != "gres":
            yield option, value


def asks_for_gpus(config: JobConfig) -> bool:
    """Return whether hpc-rl requests the GPUs: not for jobs on CPUs, and not if the user's own options request them."""
    own = config.slurm.sbatch
    return config.trainer.uses_gpus and not own.keys() & _GPU_OPTIONS and not _names_gpus(own.get("gres"))


def cpus_per_node(config: JobConfig) -> int:
    """Return the CPUs that the job requests on each node."""
    slurm, count = config.slurm, config.trainer.n_gpus_per_node
    if slurm.cpus_per_task:
        return slurm.cpus_per_task
    if not config.trainer.uses_gpus:
        return slurm.node.cpus if slurm.exclusive and slurm.node.cpus else count
    if slurm.cpus_per_gpu and not (slurm.exclusive and slurm.node.cpus):
        return slurm.cpus_per_gpu * count
    if slurm.node.cpus and (slurm.exclusive or slurm.node.gpus):
        return max(1, int(slurm.node.cpus * _share(config)))
    return count


def memory_per_node(config: JobConfig) -> str | None:
    """Return the memory that the job requests on each node, in the form of --mem; None: Slurm's default."""
    slurm = config.slurm
    if slurm.mem is not None or slurm.mem_option == "none":
        return slurm.mem
    share = _share(config)
    if share >= 1:
        return "0"  # all memory that Slurm gives to jobs on the node (sbatch(1), --mem)
    return f"{int(slurm.node.mem_mb * share)}M" if slurm.node.mem_mb and share else None


def granted_bytes(config: JobConfig) -> float | None:
    """Return the memory that the job requests on each node, in bytes; None if Slurm decides, or if the memory of a
    whole node is unknown."""
    asked = memory_per_node(config)
    megabytes = config.slurm.node.mem_mb if asked == "0" else memory_mb(asked or "")
    return megabytes * 2.0**20 if megabytes else None


def _memory(config: JobConfig) -> Iterator[Directive]:
    slurm = config.slurm
    asked = memory_per_node(config)
    if asked is None or _MEMORY_OPTIONS & slurm.sbatch.keys():
        return
    if slurm.mem_option == "mem-per-gpu" and asks_for_gpus(config):
        total = slurm.node.mem_mb if asked == "0" else memory_mb(asked)
        if total:
            yield "mem-per-gpu", f"{total // config.trainer.n_gpus_per_node}M"
    elif slurm.mem_option == "mem-per-cpu":
        total = slurm.node.mem_mb if asked == "0" else memory_mb(asked)
        if total:
            yield "mem-per-cpu", f"{max(1, total // cpus_per_node(config))}M"
    else:
        yield "mem", asked


def _share(config: JobConfig) -> Fraction:
    """Return the fraction of a node that the job requests; 0 if the size of the nodes is unknown."""
    slurm, trainer = config.slurm, config.trainer
    if slurm.exclusive:
        return Fraction(1)
    if trainer.uses_gpus:
        requested, available = trainer.n_gpus_per_node, slurm.node.gpus
    else:
        requested, available = cpus_per_node(config), slurm.node.cpus
    return Fraction(min(requested, available), available) if available else Fraction(0)


def _gpu_value(slurm: SlurmConfig, count: int) -> str | int:
    typed = f"{slurm.gpu_type}:{count}" if slurm.gpu_type else count
    if slurm.gpu_option != "gres":
        return typed
    other = slurm.sbatch.get("gres")
    return f"gpu:{typed}" + (f",{other}" if other else "")


def _names_gpus(gres: str | int | None) -> bool:
    return any(part.split(":")[0] in _GPU_GRES for part in str(gres or "").split(","))
