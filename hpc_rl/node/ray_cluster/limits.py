"""The resources that the job may use on this node: the smallest of the limits of cgroups, Slurm and the kernel.

Ray itself would read the limits of the whole machine (the root cgroup) and fill a shared node.
"""

from __future__ import annotations

import math
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.system.accelerators import visible_devices
from hpc_rl.system.cgroups import own_cgroups

OBJECT_STORE_SHARE = 0.3
OBJECT_STORE_LEAST = 80_000_000
"""Ray rejects less than 75 MiB."""
MAX_FILES = 65535

_UNLIMITED = 1 << 60
"""cgroup v1 reports a number near 2^63 for no limit."""


@dataclass(frozen=True)
class RayResources:
    """The resources of this node that Ray may use."""

    cpus: int
    gpus: int
    memory: int
    """Bytes for tasks and actors, without the object store."""
    object_store: int
    """Bytes of shared memory, which count towards the job's memory."""


def ray_resources(
    allocation: Allocation,
    environ: Mapping[str, str],
    *,
    most_cpus: int | None = None,
    device: str = "cuda",
    gpus: int = 0,
    object_store: int | None = None,
    cgroups: Path = Path("/sys/fs/cgroup"),
    proc: Path = Path("/proc"),
    shm: Path = Path("/dev/shm"),
) -> RayResources:
    """Return the resources of this node, or its share if several nodes of the job run on one machine (--local).

    Args:
        most_cpus: ray_kwargs.ray_init.num_cpus, an upper limit.
        device: torch's name of the job's devices.
        gpus: smallest number of GPUs that the job needs on each node; 0 to give Ray none.
        object_store: bytes, or None for a share of the memory. In both cases /dev/shm's free space is the limit.

    Raises:
        UserError: there are fewer GPUs than the job needs, or there is no room for an object store.
    """
    sharing = allocation.nodes.count(allocation.node)
    groups = list(own_cgroups(proc, cgroups))
    cpus = min([allocation.cpus, *cpu_quotas(groups), *([most_cpus] if most_cpus else [])])
    memory = memory_limit(allocation, environ, cgroups=cgroups, proc=proc)
    free = shutil.disk_usage(shm).free // sharing
    store = min(object_store or int(OBJECT_STORE_SHARE * memory), free)
    if store < OBJECT_STORE_LEAST or store >= memory:
        raise UserError(
            f"node {allocation.node} has {memory:,} bytes of memory for the job and {free:,} free in {shm}: Ray's "
            f"object store would get {store:,}, and needs at least {OBJECT_STORE_LEAST:,} and less than the memory; "
            "ask for more --mem, or set ray.object_store_gb"
        )
    return RayResources(max(1, cpus), _gpus(allocation, environ, device, gpus), memory - store, store)


def memory_limit(
    allocation: Allocation,
    environ: Mapping[str, str],
    *,
    cgroups: Path = Path("/sys/fs/cgroup"),
    proc: Path = Path("/proc"),
) -> int:
    """Return the bytes that the job may use on this node, including the object store."""
    groups = list(own_cgroups(proc, cgroups))
    return min(memory_limits(groups, environ, allocation.cpus, proc)) // allocation.nodes.count(allocation.node)


def raise_file_limit() -> None:
    """Raise the limit on open files: Ray opens one for each connection between its processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def cpu_quotas(groups: list[Path]) -> Iterator[int]:
    """Yield CPU limits by bandwidth control: cpu.max (v2), or cpu.cfs_quota_us / cpu.cfs_period_us (v1)."""
    for group in groups:
        both = _words(group / "cpu.max") or [
            *_words(group / "cpu.cfs_quota_us"),
            *_words(group / "cpu.cfs_period_us"),
        ]
        if len(both) == 2 and both[0].isdigit():
            yield max(1, math.floor(int(both[0]) / int(both[1])))


def memory_limits(groups: list[Path], environ: Mapping[str, str], cpus: int, proc: Path) -> Iterator[int]:
    """Yield the memory limit of each source that sets one, in bytes."""
    for group in groups:
        for name in ("memory.max", "memory.limit_in_bytes"):
            for word in _words(group / name):
                if word.isdigit() and int(word) < _UNLIMITED:
                    yield int(word)
    # In megabytes; 0 stands for all memory of the node (sbatch's manual page, --mem).
    if per_node := int(environ.get("SLURM_MEM_PER_NODE") or 0):
        yield per_node << 20
    elif per_cpu := int(environ.get("SLURM_MEM_PER_CPU") or 0):
        yield (per_cpu << 20) * cpus
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    yield int(fields["MemTotal"].split()[0]) << 10


def _gpus(allocation: Allocation, environ: Mapping[str, str], device: str, wanted: int) -> int:
    """Return the number of GPUs according to Slurm and the environment, or `wanted` if neither sets one."""
    if wanted == 0:
        return 0
    visible = visible_devices(environ, device)
    found = [len(visible)] if visible else []
    if on_node := environ.get("SLURM_GPUS_ON_NODE"):
        found.append(int(on_node))
    granted = min(found, default=wanted)
    if granted < wanted:
        raise UserError(
            f"node {allocation.node} grants {counted(granted, 'GPU')}, and trainer.n_gpus_per_node is {wanted}: "
            "lower it, ask for more, or use trainer.device=cpu"
        )
    return granted


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
