"""Whether a partition can provide what a job requests. Pure functions of the node groups that sinfo reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_rl.host.counted import counted
from hpc_rl.slurm.cluster import NodeGroup

_FLAGS = "--nodes, --gpus-per-node, --cpus-per-task, --mem"


@dataclass(frozen=True)
class Need:
    """What a job requests on each of its nodes."""

    nodes: int
    gpus: int
    gpu_type: str | None
    """None for any type."""
    cpus: int
    memory_mb: int
    """0 for no request."""


def refusal(groups: Sequence[NodeGroup], partition: str | None, need: Need) -> str | None:
    """Return why the partition can never start the job, or None if it can.

    Args:
        partition: one or several, separated by commas, of which Slurm takes any. None for the default partition.
    """
    names = partition.split(",") if partition else [group.partition for group in groups if group.is_default][:1]
    known = {group.partition for group in groups}
    if not known or not names:
        return None
    if unknown := [name for name in names if name not in known]:
        return f"partition {unknown[0]} does not exist; Slurm has {', '.join(sorted(known))}"
    if any(_provides(groups, name, need) for name in names):
        return None
    has = " and ".join(map(describe, shapes([group for group in groups if group.partition in names])))
    others = sorted(name for name in known - set(names) if _provides(groups, name, need))
    advice = f"partition {' or '.join(others)} has such nodes" if others else f"request less ({_FLAGS})"
    return f"partition {','.join(names)} cannot provide {_words(need)}: it has {has}; {advice}"


def shapes(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """Merge groups that differ only in partition or features. The largest groups come first."""
    merged: dict[tuple[object, ...], NodeGroup] = {}
    for group in groups:
        key = (group.cpus, group.memory_mb, *group.gpus.items())
        nodes = group.nodes + (merged[key].nodes if key in merged else 0)
        merged[key] = replace(group, nodes=nodes)
    return sorted(merged.values(), key=lambda group: (-group.nodes, -group.all_gpus))


def describe(group: NodeGroup) -> str:
    """Return a description such as `2 nodes with 8 a100 (128 CPUs, 500000 MB)`."""
    gpus = " and ".join(_gpus(count, kind) for kind, count in group.gpus.items()) or "no GPUs"
    memory = f", {group.memory_mb} MB" if group.memory_mb > 1 else ""
    return f"{counted(group.nodes, 'node')} with {gpus} ({counted(group.cpus, 'CPU')}{memory})"


def _provides(groups: Sequence[NodeGroup], partition: str, need: Need) -> bool:
    nodes = sum(group.nodes for group in groups if group.partition == partition and _fits(group, need))
    return nodes >= need.nodes


def _fits(group: NodeGroup, need: Need) -> bool:
    gpus = group.all_gpus if need.gpu_type is None else group.gpus.get(need.gpu_type, 0)
    has_memory = group.memory_mb <= 1 or need.memory_mb <= group.memory_mb
    return group.state != "inactive" and gpus >= need.gpus and group.cpus >= need.cpus and has_memory


def _words(need: Need) -> str:
    parts = [_gpus(need.gpus, need.gpu_type)] if need.gpus else []
    parts += [counted(need.cpus, "CPU")] + ([f"{need.memory_mb} MB"] if need.memory_mb else [])
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"{counted(need.nodes, 'node')} with {listed}{' each' if need.nodes > 1 else ''}"


def _gpus(count: int, kind: str | None) -> str:
    return f"{count} {kind}" if kind else counted(count, "GPU")
