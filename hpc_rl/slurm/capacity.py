"""Whether a partition can provide what a job requests. Pure functions of the node groups that sinfo reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_rl.formats.counted import counted
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


def refusal(groups: Sequence[NodeGroup], partition: str | None, need: Need, has_own_limits: bool = False) -> str | None:
    """Return why the partition can never start the job, or None if it can.

    Args:
        partition: one or several, separated by commas, of which Slurm takes any. None for the default partition.
        has_own_limits: whether the job's quality of service may replace the partition's limits of nodes.
    """
    names = partition.split(",") if partition else [group.partition for group in groups if group.is_default][:1]
    known = {group.partition for group in groups}
    if not known or not names:
        return None
    if unknown := [name for name in names if name not in known]:
        return f"partition {unknown[0]} does not exist; Slurm has {', '.join(sorted(known))}"
    provided = [name for name in names if _provides(groups, name, need)]
    if provided:
        outside = None if has_own_limits else _outside_limits(groups, provided, need)
        return outside and f"{outside}: request {counted(need.nodes, 'node')} from another partition, or change --nodes"
    if cause := _inactive(groups, names) or _other_spelling(groups, names, need):
        return cause
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


def _outside_limits(groups: Sequence[NodeGroup], names: Sequence[str], need: Need) -> str | None:
    """Return which limits of job sizes exclude the job from all of these partitions; None if one has it."""
    limits = {group.partition: (group.min_nodes, group.max_nodes) for group in groups if group.partition in names}
    if any(least <= need.nodes <= (most or need.nodes) for least, most in limits.values()):
        return None
    texts = [
        f"partition {name} starts jobs of at {'least' if need.nodes < least else 'most'} "
        f"{counted(least if need.nodes < least else most or 0, 'node')}"
        for name, (least, most) in limits.items()
    ]
    return f"{' and '.join(texts)}, and --nodes is {need.nodes}"


def _inactive(groups: Sequence[NodeGroup], names: Sequence[str]) -> str | None:
    states = {group.partition: group.state for group in groups if group.partition in names}
    if any(state != "inactive" for state in states.values()):
        return None
    return f"partition {','.join(names)} is inactive, and starts no job: choose another --partition"


def _other_spelling(groups: Sequence[NodeGroup], names: Sequence[str], need: Need) -> str | None:
    """Return that a type of GPU is written with other letters, if that is why no node has it."""
    known = {kind for group in groups if group.partition in names for kind in group.gpus}
    same = sorted(kind for kind in known if kind.lower() == (need.gpu_type or "").lower())
    if not same or need.gpu_type in known:
        return None
    return (
        f"partition {','.join(names)} has no GPUs of the type {need.gpu_type}, but of the type {same[0]}: Slurm "
        f"distinguishes capital letters, so write slurm.gpu_type={same[0]}"
    )


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
