"""Proposal of a site profile from facts about a cluster. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_rl.config.slurm import walltime_s
from hpc_rl.slurm.capacity import describe, shapes
from hpc_rl.slurm.cluster import Association, NodeGroup, Partition

LONGEST_S = 24 * 3600
"""Walltime that most queues start soon, in seconds. A longer run resumes in the next job."""
_SHORTEST_S = 600
_LISTED = 12
_PART_OF_A_GPU = re.compile(r"\d+g\.\d+gb")
"""NVIDIA's names of MIG devices: slices, then memory."""


@dataclass(frozen=True)
class Facts:
    """Facts about a cluster and its login node."""

    config: Mapping[str, str]
    """`scontrol show config`."""
    groups: Sequence[NodeGroup]
    partitions: Sequence[Partition]
    associations: Sequence[Association]
    """Those of the user. Empty without accounting."""
    unix_groups: frozenset[str]
    interfaces: Mapping[str, str]
    """Those of the login node: name -> IPv4 address."""
    has_modules: bool
    modules: Sequence[str]
    """Modules that training may need."""
    runtimes: Sequence[str]
    """Container runtimes on the login node."""
    proxy: str | None
    hf_home: str | None

    @property
    def needs_account(self) -> bool:
        """Whether Slurm rejects jobs without an account."""
        return "associations" in self.config.get("AccountingStorageEnforce", "").split(",")


def choose_partitions(facts: Facts) -> list[Partition]:
    """Return the partitions that the user may use: first those with GPUs, then the default one, then larger ones."""
    accounts = {one.account for one in facts.associations}

    def usable(one: Partition) -> bool:
        may = one.groups is None or one.groups & facts.unix_groups
        pays = one.accounts is None or not accounts or one.accounts & accounts
        return bool(one.state == "UP" and not one.is_hidden and may and pays and groups_of(facts, one))

    def likely(one: Partition) -> tuple[bool, bool, int, int]:
        whole = {kind: n for kind, n in count_gpus(facts, one).items() if not _PART_OF_A_GPU.search(kind)}
        return bool(whole), one.is_default, sum(whole.values()), walltime_s(one.max_time) or LONGEST_S * 365

    return sorted(filter(usable, facts.partitions), key=likely, reverse=True)


def choose_accounts(facts: Facts, partition: Partition) -> list[str]:
    """Return the accounts that the user may use in a partition."""
    found = [one.account for one in facts.associations if one.partition in ("", partition.name)]
    return sorted({one for one in found if partition.accounts is None or one in partition.accounts})


def groups_of(facts: Facts, partition: Partition) -> list[NodeGroup]:
    """Return the node groups of a partition."""
    return [group for group in facts.groups if group.partition == partition.name]


def count_gpus(facts: Facts, partition: Partition) -> Counter[str]:
    """Count the GPUs of a partition by type."""
    found: Counter[str] = Counter()
    for group in groups_of(facts, partition):
        found.update({kind: count * group.nodes for kind, count in group.gpus.items()})
    return found


def propose(facts: Facts, partition: Partition, account: str | None, date: str) -> str:
    """Return the profile as YAML with comments. Guesses are commented out.

    Args:
        account: None for Slurm's default.
    """
    kinds = count_gpus(facts, partition)
    kind = max(kinds, key=lambda name: (not _PART_OF_A_GPU.search(name), kinds[name]), default=None)
    lines = [
        f"# Cluster {facts.config.get('ClusterName', '?')}, Slurm {facts.config.get('SLURM_VERSION', '?')}; written by "
        f"`hpc-rl site detect` on {date}. You can edit it.",
        "# `hpc-rl site show` prints the settings in effect; `hpc-rl config sft --help` explains every key.",
        "slurm:",
        *_indented(_queue(facts, partition, account)),
        *_indented(_gpus(facts, kinds, kind)),
        *_indented(_shape(facts, partition, kind)),
        *_indented(_surroundings(facts)),
        *_elsewhere(facts, kind),
    ]
    return "\n".join(lines) + "\n"


def _queue(facts: Facts, partition: Partition, account: str | None) -> Iterator[str]:
    yield "# Partitions that you may use:"
    for one in choose_partitions(facts)[:_LISTED]:
        yield f"#   {one.name}, at most {one.max_time}:"
        yield from (f"#     {describe(shape)}" for shape in shapes(groups_of(facts, one))[:_LISTED])
    yield f"partition: {_yaml(partition.name)}"
    accounts = choose_accounts(facts, partition)
    if accounts:
        yield f"# Your accounts: {', '.join(accounts)}. Without `account`, Slurm charges your default account."
        yield f"account: {_yaml(account)}" if account else f"# account: {_yaml(accounts[0])}"
    elif facts.needs_account:
        yield "# Slurm lists no account of yours, and rejects jobs without one: ask the cluster's administrators."
        yield "# account: my-project"
    qos = sorted({name for one in facts.associations for name in one.qos})
    if qos:
        yield f"# qos: {_yaml(qos[0])}    # yours: {', '.join(qos)}"
    features = sorted({feature for group in groups_of(facts, partition) for feature in group.features})
    if features:
        yield f"# constraint: {_yaml(features[0])}    # features of its nodes: {', '.join(features)}"
    yield from _time(facts, partition)


def _time(facts: Facts, partition: Partition) -> Iterator[str]:
    limits = [partition.max_time, *(one.max_time for one in facts.associations if one.max_time)]
    shortest = min(limits, key=lambda limit: walltime_s(limit) or LONGEST_S * 365)
    seconds = walltime_s(shortest)
    time = "24:00:00" if seconds is None or seconds > LONGEST_S else shortest
    if (walltime_s(time) or 0) >= _SHORTEST_S:
        yield "# Before the walltime ends, a run saves and requeues itself. In quotes: YAML reads 24:00:00 as a number."
        yield f'time: "{time}"'


def _gpus(facts: Facts, kinds: Mapping[str, int], kind: str | None) -> Iterator[str]:
    if kind is None:
        return
    select = facts.config.get("SelectType", "")
    if select == "select/cons_tres":
        yield "gpu_option: gpus-per-node"
    else:
        yield f"# {select} supports no other option for GPUs."
        yield "gpu_option: gres"
    if kind:
        others = [f"{name} ({count})" for name, count in kinds.items() if name != kind]
        yield f"gpu_type: {_yaml(kind)}" + (f"    # there are also {', '.join(others)}" if others else "")


def _shape(facts: Facts, partition: Partition, kind: str | None) -> Iterator[str]:
    """Yield the node size that requests are scaled by, and settings for how the cluster shares nodes and memory."""
    if partition.exclusive:
        yield "# Jobs get whole nodes: all CPUs and all memory."
        yield "exclusive: true"
    defaults = partition.job_defaults
    gives_memory = "MEMORY" in facts.config.get("SelectTypeParameters", "")
    if not gives_memory:
        yield "# Slurm does not allocate memory on this cluster."
        yield "mem_option: none"
    elif "DefMemPerGPU" in defaults:
        yield f"# The partition allocates {defaults['DefMemPerGPU']} MB with each GPU."
        yield "mem_option: none"
    if "DefCpuPerGPU" in defaults:
        yield f"cpus_per_gpu: {defaults['DefCpuPerGPU']}    # the partition's default"
    groups = groups_of(facts, partition)
    node = shapes([group for group in groups if kind is None or kind in group.gpus])[0]
    cpus = _cpus(partition, node, alone=len(shapes(groups)) == 1)
    memory = _memory(partition, node, cpus)
    shape = {"gpus": node.gpus.get(kind) if kind is not None else None, "cpus": cpus}
    shape["mem_mb"] = memory if gives_memory and memory > 1 else None
    share = "" if partition.exclusive else " A job with half of the GPUs requests half of the CPUs and memory."
    yield f"# The size of its nodes.{share}"
    if len(shapes(groups)) > 1:
        yield "# There are several sizes (see above); this is the most common one."
    yield f"node: {{{', '.join(f'{key}: {value}' for key, value in shape.items() if value)}}}"


def _cpus(partition: Partition, node: NodeGroup, alone: bool) -> int:
    """Return the CPUs of a node that jobs can use, without those reserved for the system if all nodes are alike."""
    cpus = partition.cpus // partition.nodes if alone and partition.nodes else node.cpus
    return min(cpus, partition.max_cpus_per_node or cpus)


def _memory(partition: Partition, node: NodeGroup, cpus: int) -> int:
    limits = [node.memory_mb, partition.max_mem_per_node_mb]
    limits += [partition.max_mem_per_cpu_mb * cpus if partition.max_mem_per_cpu_mb else None]
    return min(limit for limit in limits if limit)


def _surroundings(facts: Facts) -> Iterator[str]:
    if len(facts.interfaces) > 1:
        fast = next((name for name in facts.interfaces if re.match("ib|hsn", name)), None)
        here = ", ".join(f"{name} ({address})" for name, address in facts.interfaces.items())
        yield f"# Interfaces here: {here}. Compute nodes may differ: run hpc-rl doctor --on-nodes 2."
        yield f"# interface: {fast or next(iter(facts.interfaces))}    # default: the interface of the default route"
    if facts.has_modules:
        found = f"    # here: {', '.join(facts.modules)}" if facts.modules else ""
        yield f"# modules: [{facts.modules[-1] if facts.modules else 'cuda'}]{found}"
    if facts.proxy:
        yield f"# proxy: {_yaml(facts.proxy)}    # the login node's; compute nodes may need it too"
    yield '# setup: ["export TMPDIR=/local/$SLURM_JOB_ID"]    # commands before the run; `epilogue` for those after it'


def _elsewhere(facts: Facts, kind: str | None) -> Iterator[str]:
    """Yield the other sections."""
    if kind is None:
        yield "trainer:"
        yield "  device: cpu    # this partition has no GPUs"
    folder = f", hf_home: {_yaml(facts.hf_home)}" if facts.hf_home else ""
    yield f"# cache: {{offline: true{folder}}}    # if compute nodes have no internet"
    if facts.runtimes:
        yield f"# container: {{image: /path/to/image.sif}}    # installed: {', '.join(facts.runtimes)}"


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _yaml(text: str) -> str:
    """Return a text in YAML, with quotes if it would be read as another type (0123, on)."""
    import yaml

    written: str = yaml.safe_dump(text, width=1000)
    return written.removesuffix("\n...\n").strip()
