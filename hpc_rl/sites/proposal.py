"""Proposal of a site profile from facts about a cluster, and from what it accepts. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_rl.config.slurm import walltime_s
from hpc_rl.formats.gpu_models import is_part, named_gb
from hpc_rl.sites.choice import Choice, Dimension
from hpc_rl.slurm.capacity import describe, shapes
from hpc_rl.slurm.cluster import Association, NodeGroup, Partition, preemption

LONGEST_S = 24 * 3600
"""Walltime that most queues start soon, in seconds. A longer run resumes in the next job."""
_SHORTEST_S = 600
_SHORTER = ("04:00:00", "01:00:00", "00:30:00")
"""Walltimes to try if a longer one is refused."""
_LISTED = 12
_MOST_FEATURES = 4
_LONGEST_MESSAGE = 300
_SPARE = re.compile(r"preempt|scaven|spot|standby|idle|low|debug|test", re.IGNORECASE)
"""Names that sites give to qualities of service for spare resources or trials."""


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
    host: str = ""
    """Short name of the login node."""
    is_root: bool = False
    clusters: str = ""
    """The cluster that variables have chosen; empty for the local one."""

    @property
    def needs_account(self) -> bool:
        """Whether Slurm rejects jobs without an account."""
        return "associations" in self.config.get("AccountingStorageEnforce", "").split(",")


def choose_partitions(facts: Facts) -> list[Partition]:
    """Return the partitions that the user may use, the likely ones first.

    The order is: those with GPUs, those whose jobs are not preempted, the default one, larger ones.
    """
    accounts = {one.account for one in facts.associations}
    qos = {name for one in facts.associations for name in one.qos}
    highest = max((one.priority_tier for one in facts.partitions), default=0)

    def usable(one: Partition) -> bool:
        may = one.groups is None or one.groups & facts.unix_groups
        pays = not accounts or any(_accepts(one, account) for account in accounts)
        qualified = not qos or any(_allows(one, name) for name in qos)
        shown = one.is_default or not one.is_hidden
        is_open = (facts.is_root or not one.only_root) and not one.needs_reservation
        from_here = one.submit_hosts is None or facts.host in one.submit_hosts
        lets_in = may and pays and qualified and is_open and from_here
        return bool(one.state == "UP" and shown and lets_in and groups_of(facts, one))

    def likely(one: Partition) -> tuple[bool, bool, bool, int, int]:
        whole = {kind: n for kind, n in count_gpus(facts, one).items() if not is_part(kind)}
        stays = not is_preemptible(facts, one, highest)
        return bool(whole), stays, one.is_default, sum(whole.values()), walltime_s(one.max_time) or LONGEST_S * 365

    return sorted(filter(usable, facts.partitions), key=likely, reverse=True)


def is_preemptible(facts: Facts, partition: Partition, highest: int) -> bool:
    """Return whether jobs of other partitions preempt those of this one.

    Args:
        highest: PriorityTier of the partition with the highest one.
    """
    by_partition = facts.config.get("PreemptType") == "preempt/partition_prio"
    return by_partition and partition.preempt_mode != "OFF" and partition.priority_tier < highest


def choose_accounts(facts: Facts, partition: Partition) -> list[str]:
    """Return the accounts that the user may use in a partition."""
    found = [one.account for one in facts.associations if one.partition in ("", partition.name)]
    return sorted({one for one in found if _accepts(partition, one)})


def _accepts(partition: Partition, account: str) -> bool:
    """Return whether a partition lets an account in. A list of allowed ones replaces that of the denied ones."""
    if partition.accounts is not None:
        return account in partition.accounts
    return account not in partition.denied_accounts


def _allows(partition: Partition, qos: str) -> bool:
    return qos in partition.qos if partition.qos is not None else qos not in partition.denied_qos


def groups_of(facts: Facts, partition: Partition) -> list[NodeGroup]:
    """Return the node groups of a partition."""
    return [group for group in facts.groups if group.partition == partition.name]


def count_gpus(facts: Facts, partition: Partition) -> Counter[str]:
    """Count the GPUs of a partition by type."""
    found: Counter[str] = Counter()
    for group in groups_of(facts, partition):
        found.update({kind: count * group.nodes for kind, count in group.gpus.items()})
    return found


def first_choice(facts: Facts, partition: Partition, account: str | None) -> Choice:
    """Return the options that Slurm's configuration suggests.

    Args:
        account: None for Slurm's default.
    """
    kind = _usual_gpu(facts, partition)
    gpu_option = None if kind is None else "gpus-per-node" if _selects_gpus(facts) else "gres"
    return Choice(
        time=_time(facts, partition),
        account=account,
        gpu_option=gpu_option,
        gpu_type=kind or None,
        mem_option=_mem_option(facts, partition),
        exclusive=partition.exclusive,
    )


def dimensions(facts: Facts, partition: Partition, first: Choice, is_account_fixed: bool) -> list[Dimension]:
    """Return the options that the cluster may require otherwise, for `search`.

    Args:
        is_account_fixed: the user has chosen the account.
    """
    accounts = [] if is_account_fixed else choose_accounts(facts, partition)
    features = sorted({feature for group in groups_of(facts, partition) for feature in group.features})
    gpus = [(option, kind) for option in ("gpus-per-node", "gres") for kind in (first.gpu_type, None)]
    gpus += [("gpus-per-task", first.gpu_type)]
    memory = ("mem", "mem-per-cpu", "mem-per-gpu", "none")
    shorter = [time for time in _SHORTER if (walltime_s(time) or 0) < (walltime_s(first.time or "") or 0)]
    directives = ("requeue", "open-mode", "signal", "ntasks-per-node")
    return [
        Dimension("account|project", [{"account": one} for one in accounts]),
        Dimension("qos|quality", [{"qos": one} for one in _qualities(facts, partition)]),
        Dimension(
            "gpu|gres|type|generic resource",
            [{"gpu_option": option, "gpu_type": kind} for option, kind in gpus] if first.gpu_option else [],
        ),
        Dimension(r"\bmem(ory)?\b", [{"mem_option": one} for one in memory] if _allocates_memory(facts) else []),
        Dimension("constraint|feature", [{"constraint": one} for one in features[:_MOST_FEATURES]]),
        Dimension("exclusive|whole node|full node", [{"exclusive": True}], only_if_mentioned=True),
        Dimension("time|limit", [{"time": one} for one in shorter], only_if_mentioned=True),
        *(Dimension(one, [{"leave_out": (one,)}], only_if_mentioned=True) for one in directives),
    ]


def propose(facts: Facts, partition: Partition, choice: Choice, date: str, refused: str | None = None) -> str:
    """Return the profile as YAML with comments. Guesses are commented out.

    Args:
        choice: the options that the cluster accepts, if `refused` is None.
        refused: sbatch's message if it accepts no choice.
    """
    lines = [
        f"# Cluster {facts.config.get('ClusterName', '?')}, Slurm {facts.config.get('SLURM_VERSION', '?')}; written by "
        f"`hpc-rl site detect` on {date}. You can edit it.",
        "# `hpc-rl site show` prints the settings in effect; `hpc-rl config sft --help` explains every key.",
        "slurm:",
        *([f"  sbatch: {{clusters: {_yaml(facts.clusters)}}}"] if facts.clusters else []),
        *_indented(_queue(facts, partition, choice)),
        *_indented(_gpus(facts, partition, choice)),
        *_indented(_shape(facts, partition, choice)),
        *([f"  leave_out: [{', '.join(choice.leave_out)}]"] if choice.leave_out else []),
        *_indented(f"# sbatch refuses a test job with these settings: {line}" for line in _wrapped(refused)),
        *_indented(_surroundings(facts)),
        *_elsewhere(facts, choice),
    ]
    return "\n".join(lines) + "\n"


def _queue(facts: Facts, partition: Partition, choice: Choice) -> Iterator[str]:
    usable = choose_partitions(facts)
    highest = max((one.priority_tier for one in facts.partitions), default=0)
    yield "# Partitions that you may use:"
    for one in usable[:_LISTED]:
        preempted = f", preemptible ({preemption(one, facts.config)})" if is_preemptible(facts, one, highest) else ""
        yield f"#   {one.name}, at most {one.max_time}{preempted}:"
        yield from (f"#     {describe(shape)}" for shape in shapes(groups_of(facts, one))[:_LISTED])
    yield f"partition: {_yaml(partition.name)}"
    if partition.min_nodes > 1 or partition.max_nodes is not None:
        most = "any number of" if partition.max_nodes is None else partition.max_nodes
        yield f"# Its jobs have {max(1, partition.min_nodes)} to {most} nodes."
    if partition.jobs_per_cpu > 1:
        yield f"# Up to {partition.jobs_per_cpu} jobs run on the same CPUs of this partition at a time."
    accounts = choose_accounts(facts, partition)
    if accounts:
        yield f"# Your accounts: {', '.join(accounts)}. Without `account`, Slurm charges your default account."
        yield f"account: {_yaml(choice.account)}" if choice.account else f"# account: {_yaml(accounts[0])}"
    elif facts.needs_account:
        yield "# Slurm lists no account of yours, and rejects jobs without one: ask the cluster's administrators."
        yield "# account: my-project"
    qos = _qualities(facts, partition)
    if qos:
        mark = "" if choice.qos else "# "
        yield f"{mark}qos: {_yaml(choice.qos or qos[0])}    # yours: {', '.join(qos)}"
    features = sorted({feature for group in groups_of(facts, partition) for feature in group.features})
    if features:
        mark = "" if choice.constraint else "# "
        listed = f"    # features of its nodes: {', '.join(features)}"
        yield f"{mark}constraint: {_yaml(choice.constraint or features[0])}{listed}"
    if choice.time:
        yield "# Before the walltime ends, a run saves and requeues itself. In quotes: YAML reads 24:00:00 as a number."
        yield f'time: "{choice.time}"'


def _qualities(facts: Facts, partition: Partition) -> list[str]:
    """Return the user's qualities of service that the partition allows: Slurm's `normal`, others, spare resources."""
    names = {name for one in facts.associations for name in one.qos if _allows(partition, name)}
    return sorted(names, key=lambda name: (bool(_SPARE.search(name)), name != "normal", name))


def _time(facts: Facts, partition: Partition) -> str | None:
    limits = [partition.max_time, *(one.max_time for one in facts.associations if one.max_time)]
    shortest = min(limits, key=lambda limit: walltime_s(limit) or LONGEST_S * 365)
    seconds = walltime_s(shortest)
    time = "24:00:00" if seconds is None or seconds > LONGEST_S else shortest
    return time if (walltime_s(time) or 0) >= _SHORTEST_S else None


def _usual_gpu(facts: Facts, partition: Partition) -> str | None:
    """Return the most frequent type of GPU, if possible of whole ones; empty if it has no name; None without GPUs."""
    kinds = count_gpus(facts, partition)
    return max(kinds, key=lambda name: (not is_part(name), kinds[name]), default=None)


def _selects_gpus(facts: Facts) -> bool:
    return facts.config.get("SelectType", "") == "select/cons_tres"


def _allocates_memory(facts: Facts) -> bool:
    return "MEMORY" in facts.config.get("SelectTypeParameters", "")


def _mem_option(facts: Facts, partition: Partition) -> str:
    if not _allocates_memory(facts) or "DefMemPerGPU" in partition.job_defaults:
        return "none"
    node = _usual_shape(facts, partition)
    limit = _mem_per_cpu(facts, partition)
    return "mem-per-cpu" if limit and limit * node.cpus < node.memory_mb else "mem"


def _mem_per_cpu(facts: Facts, partition: Partition) -> int:
    """Return the most memory for each CPU in MB; 0 for no limit. A partition's limit replaces the cluster's."""
    if partition.max_mem_per_cpu_mb or partition.max_mem_per_node_mb:
        return partition.max_mem_per_cpu_mb or 0
    cluster = facts.config.get("MaxMemPerCPU", "")
    return int(cluster) if cluster.isdigit() else 0


def _gpus(facts: Facts, partition: Partition, choice: Choice) -> Iterator[str]:
    if choice.gpu_option is None:
        return
    if not _selects_gpus(facts):
        yield f"# {facts.config.get('SelectType', '')} supports no other option for GPUs."
    yield f"gpu_option: {choice.gpu_option}"
    kinds = count_gpus(facts, partition)
    others = [f"{name} ({count})" for name, count in kinds.items() if name and name != choice.gpu_type]
    if choice.gpu_type:
        yield f"gpu_type: {_yaml(choice.gpu_type)}" + (f"    # there are also {', '.join(others)}" if others else "")
    elif others:
        yield f"# gpu_type: {_yaml(_usual_gpu(facts, partition) or '')}    # there are {', '.join(others)}"


def _shape(facts: Facts, partition: Partition, choice: Choice) -> Iterator[str]:
    """Yield the node size that requests are scaled by, and settings for how the cluster shares nodes and memory."""
    if choice.exclusive:
        yield "# Jobs get whole nodes: all CPUs and all memory."
        yield "exclusive: true"
    defaults = partition.job_defaults
    if not _allocates_memory(facts):
        yield "# Slurm does not allocate memory on this cluster."
    elif "DefMemPerGPU" in defaults:
        yield f"# The partition allocates {defaults['DefMemPerGPU']} MB with each GPU."
    if choice.mem_option != "mem":
        yield f"mem_option: {choice.mem_option}"
    if "DefCpuPerGPU" in defaults:
        yield f"cpus_per_gpu: {defaults['DefCpuPerGPU']}    # the partition's default"
    kind, every = _usual_gpu(facts, partition), shapes(groups_of(facts, partition))
    node = _usual_shape(facts, partition)
    cpus = _cpus(partition, node, alone=len(every) == 1)
    memory = _memory(facts, partition, node, cpus)
    shape = {"gpus": node.gpus.get(kind) if kind is not None else None, "cpus": cpus}
    shape["mem_mb"] = memory if _allocates_memory(facts) and memory > 1 else None
    share = "" if choice.exclusive else " A job with half of the GPUs requests half of the CPUs and memory."
    yield f"# The size of its nodes.{share}"
    if len(every) > 1:
        yield "# There are several sizes (see above); this is the most common one."
    yield f"node: {{{', '.join(f'{key}: {value}' for key, value in shape.items() if value)}}}"
    if kind is not None and named_gb(kind) is None:
        yield "# Add gpu_gb to the node, the memory of a GPU in 10^9 bytes: submit then refuses jobs that cannot fit."
        yield "# Without it, hpc-rl uses the memory that an earlier run in the partition recorded."


def _usual_shape(facts: Facts, partition: Partition) -> NodeGroup:
    """Return the most frequent kind of node, of those with the usual GPU."""
    kind = _usual_gpu(facts, partition)
    return shapes([group for group in groups_of(facts, partition) if kind is None or kind in group.gpus])[0]


def _cpus(partition: Partition, node: NodeGroup, alone: bool) -> int:
    """Return the CPUs of a node that jobs can use, without those reserved for the system if all nodes are alike."""
    cpus = partition.cpus // partition.nodes if alone and partition.nodes else node.cpus
    return min(cpus, partition.max_cpus_per_node or cpus)


def _memory(facts: Facts, partition: Partition, node: NodeGroup, cpus: int) -> int:
    limits = [node.memory_mb, partition.max_mem_per_node_mb, _mem_per_cpu(facts, partition) * cpus]
    return min(limit for limit in limits if limit)


def _surroundings(facts: Facts) -> Iterator[str]:
    if len(facts.interfaces) > 1:
        fast = next((name for name in facts.interfaces if re.match("ib|hsn", name)), None)
        here = ", ".join(f"{name} ({address})" for name, address in facts.interfaces.items())
        yield f"# Interfaces here: {here}. Compute nodes may differ: run hpc-rl doctor --on-nodes 2."
        yield f"# interface: {fast or next(iter(facts.interfaces))}    # default: the interface of the default route"
    yield "# python: /path/to/env/bin/python    # of jobs, chat and export, if this one has no torch"
    if facts.has_modules:
        found = f"    # here: {', '.join(facts.modules)}" if facts.modules else ""
        yield f"# modules: [{facts.modules[-1] if facts.modules else 'cuda'}]{found}"
    if facts.proxy:
        yield f"# proxy: {_yaml(facts.proxy)}    # the login node's; compute nodes may need it too"
    yield '# setup: ["export TMPDIR=/local/$SLURM_JOB_ID"]    # commands before the run; `epilogue` for those after it'


def _elsewhere(facts: Facts, choice: Choice) -> Iterator[str]:
    """Yield the other sections."""
    if choice.gpu_option is None:
        yield "trainer:"
        yield "  device: cpu    # this partition has no GPUs"
    folder = f", hf_home: {_yaml(facts.hf_home)}" if facts.hf_home else ""
    yield f"# cache: {{offline: true{folder}}}    # if compute nodes have no internet"
    if facts.runtimes:
        yield f"# container: {{image: /path/to/image.sif}}    # installed: {', '.join(facts.runtimes)}"


def _wrapped(refused: str | None) -> list[str]:
    """Return a message on one line, and nothing without one."""
    return [] if refused is None else [" ".join(refused.split())[:_LONGEST_MESSAGE]]


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _yaml(text: str) -> str:
    """Return a text in YAML, with quotes if it would be read as another type (0123, on)."""
    import yaml

    written: str = yaml.safe_dump(text, width=1000)
    return written.removesuffix("\n...\n").strip()
