"""Facts about a cluster. Pure functions that parse the output of sinfo, scontrol, sacctmgr and ip."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_rl.slurm.allocation import expand_hostlist

SINFO_FORMAT = "%P|%a|%l|%L|%D|%c|%m|%G|%f|%h|%T|%s"
"""Columns of sinfo that describe nodes without naming them: with -e, identical nodes share a line, so a thousand nodes
are a few lines."""
ASSOCIATION_COLUMNS = "Cluster,Account,User,Partition,QOS,DefaultQOS,MaxWall,MaxTRES"


@dataclass(frozen=True)
class NodeGroup:
    """Identical nodes of one partition."""

    partition: str
    nodes: int
    cpus: int
    """CPUs of each node as Slurm counts them: hardware threads if there are any."""
    memory_mb: int
    """Memory of each node; 1 if the administrator has not configured it."""
    gpus: Mapping[str, int]
    """GPUs of each node: type -> number. The type is empty for GPUs without one."""
    is_default: bool = False
    state: str = "up"
    """State of the partition: up, down, drain or inactive (sinfo(1), AVAIL)."""
    time_limit: str = "infinite"
    features: tuple[str, ...] = ()
    min_nodes: int = 1
    """Fewest nodes that a job in the partition may have."""
    max_nodes: int | None = None
    """Most nodes; None for no limit."""

    @property
    def all_gpus(self) -> int:
        """GPUs of each node, of all types."""
        return sum(self.gpus.values())


@dataclass(frozen=True)
class Partition:
    """A partition as `scontrol show partition` reports it."""

    name: str
    is_default: bool
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    accounts: frozenset[str] | None
    """Accounts that may use it, or None for all."""
    denied_accounts: frozenset[str]
    """Accounts that may not."""
    groups: frozenset[str] | None
    """UNIX groups that may use it, or None for all."""
    qos: frozenset[str] | None
    """Qualities of service that its jobs may have, or None for all."""
    denied_qos: frozenset[str]
    """Qualities of service that its jobs may not have."""
    submit_hosts: frozenset[str] | None
    """Machines from which jobs may be submitted, or None for all."""
    only_root: bool
    """Whether only root may submit jobs."""
    needs_reservation: bool
    """Whether jobs need a reservation."""
    min_nodes: int
    """Fewest nodes of a job."""
    max_nodes: int | None
    """Most nodes of a job, or None for no limit."""
    is_hidden: bool
    """Whether Slurm lists it only if it is asked for by name."""
    max_time: str
    """In Slurm's format, or UNLIMITED."""
    default_time: str
    """Time limit of a job without --time; NONE for the maximum."""
    preempt_mode: str
    """What happens to a preempted job: OFF, REQUEUE, CANCEL or SUSPEND. GANG alone only shares time: OFF."""
    grace_s: int
    """Seconds between SIGTERM and SIGKILL for a preempted job."""
    priority_tier: int
    """With preempt/partition_prio, jobs of a partition with a higher one preempt those of this partition."""
    exclusive: bool
    """Whether jobs always get whole nodes."""
    jobs_per_cpu: int
    """Jobs that Slurm starts on the same CPUs without being asked (OverSubscribe=FORCE:N)."""
    nodes: int
    cpus: int
    """CPUs of all nodes that jobs can use, without those reserved for the system."""
    max_cpus_per_node: int | None
    max_mem_per_node_mb: int | None
    max_mem_per_cpu_mb: int | None
    job_defaults: Mapping[str, str] = field(default_factory=dict)
    """DefCpuPerGPU and DefMemPerGPU, if they are set."""


@dataclass(frozen=True)
class Association:
    """An account that the user may use."""

    account: str
    partition: str
    """The partition that it is restricted to, or an empty text."""
    qos: tuple[str, ...]
    max_time: str
    """Its time limit in Slurm's format, or an empty text for none."""


def read_sinfo(text: str) -> list[NodeGroup]:
    """Parse `sinfo -h -e -o SINFO_FORMAT`. Lines that differ only in the state of their nodes are merged."""
    nodes: Counter[tuple[str, ...]] = Counter()
    for line in text.splitlines():
        columns = [*line.split("|"), ""]  # the last column of SINFO_FORMAT is not in all recorded outputs
        if len(columns) in (12, 13):
            name, state, limit, _, count, cpus, memory, gres, features, _, _, size, *_ = columns
            nodes[name, state, limit, cpus, memory, gres, features, size] += _whole(count)
    return [
        NodeGroup(
            partition=name.removesuffix("*"),
            nodes=count,
            cpus=_whole(cpus),
            memory_mb=_whole(memory),
            gpus=parse_gpus(gres),
            is_default=name.endswith("*"),
            state=state,
            time_limit=limit,
            features=tuple(f for f in features.split(",") if f != "(null)"),
            min_nodes=_whole(size) or 1,
            max_nodes=_limit(size.rpartition("-")[2]),
        )
        for (name, state, limit, cpus, memory, gres, features, size), count in nodes.items()
        if count
    ]


def parse_gpus(gres: str) -> dict[str, int]:
    """Parse the GPUs among generic resources: `gpu:a100:8(S:0-1),nvme:1` -> {"a100": 8}; `gpu:2` -> {"": 2}.

    The sockets in parentheses may contain commas (`(S:0,2)`). MIG devices have types too (`gpu:a100_1g.5gb:7`).
    """
    found: dict[str, int] = {}
    for part in re.sub(r"\([^()]*\)", "", gres).split(","):
        match = re.fullmatch(
            r"gpu(?::(?!no_consume)([^:]++(?=:)|(?=\d*+[^:])[^:]++))?(?::no_consume)?(?::(\d+))?", part.strip()
        )
        if match:
            found[match[1] or ""] = found.get(match[1] or "", 0) + int(match[2] or 1)
    return found


def read_partitions(text: str) -> list[Partition]:
    """Parse `scontrol show partition -o`."""
    return [_partition(fields) for fields in map(_fields, text.splitlines()) if "PartitionName" in fields]


def read_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`. Settings without a value ((null)) are left out."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs if value.strip() not in ("", "(null)")}


def has_accounting(config: Mapping[str, str]) -> bool:
    """Return whether the cluster has an accounting database."""
    return not config.get("AccountingStorageType", "accounting_storage/none").endswith("/none")


def read_controllers(text: str) -> dict[str, bool]:
    """Parse the last lines of `scontrol show config`: host of a controller -> whether it is up."""
    return {host: state == "UP" for host, state in re.findall(r"^Slurmctld\([^)\n]*\) at (\S+) is (\w+)", text, re.M)}


def read_associations(text: str, cluster: str) -> list[Association]:
    """Parse `sacctmgr -nP show assoc user=NAME format=ASSOCIATION_COLUMNS`, for one cluster."""
    rows = (line.split("|") for line in text.splitlines())
    return [
        Association(row[1], row[3], tuple(filter(None, row[4].split(","))), row[6])
        for row in rows
        if len(row) == 8 and row[0] == cluster
    ]


def chosen(partitions: Sequence[Partition], name: str | None) -> Partition | None:
    """Return the partition of a job, which is the default one for None, and the first existing one of a list."""
    if name is None:
        return next((one for one in partitions if one.is_default), None)
    return next((one for wanted in name.split(",") for one in partitions if one.name == wanted), None)


def kill_wait_s(config: Mapping[str, str]) -> int:
    """Return the seconds between SIGTERM and SIGKILL for a job that ends; Slurm's default if it is not known."""
    return _whole(config.get("KillWait", "")) or 30


def preemption(partition: Partition, config: Mapping[str, str]) -> str:
    """Return what happens to a preempted job of a partition: `REQUEUE, announced 60 s before`."""
    mode = partition.preempt_mode
    if mode == "SUSPEND":
        return f"{mode}, continued later"
    graceful = partition.grace_s > 0 and "GANG" not in config.get("PreemptMode", "")  # the gang scheduler does not wait
    return f"{mode}, announced {partition.grace_s if graceful else kill_wait_s(config)} s before"


def read_interfaces(text: str) -> dict[str, str]:
    """Parse `ip -o -4 addr`: interface -> IPv4 address, without the loopback."""
    found = re.findall(r"^\d+: (\S+)\s+inet ([\d.]+)", text, re.MULTILINE)
    return {name: address for name, address in found if not address.startswith("127.")}


def _partition(fields: Mapping[str, str]) -> Partition:
    tres = dict(_pairs(fields.get("TRES", "")))
    sharing = fields.get("OverSubscribe", "NO")
    modes = set(fields.get("PreemptMode", "OFF").split(",")) - {"GANG", "WITHIN"}
    nodes, every = _whole(fields.get("TotalNodes", "")), _whole(fields.get("TotalCPUs", ""))
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        state=fields.get("State", "UP"),
        accounts=_names(fields.get("AllowAccounts", "ALL")),
        denied_accounts=_denied(fields.get("DenyAccounts", "")),
        groups=_names(fields.get("AllowGroups", "ALL")),
        qos=_names(fields.get("AllowQos", "ALL")),
        denied_qos=_denied(fields.get("DenyQos", "")),
        submit_hosts=_hosts(fields.get("AllocNodes", "ALL")),
        only_root=fields.get("RootOnly") == "YES",
        needs_reservation=fields.get("ReqResv") == "YES",
        min_nodes=_whole(fields.get("MinNodes", "")),
        max_nodes=_limit(fields.get("MaxNodes", "")),
        is_hidden=fields.get("Hidden") == "YES",
        max_time=fields.get("MaxTime", "UNLIMITED"),
        default_time=fields.get("DefaultTime", "NONE"),
        preempt_mode=next(iter(sorted(modes)), "OFF"),
        grace_s=_whole(fields.get("GraceTime", "")),
        priority_tier=_whole(fields.get("PriorityTier", "")),
        exclusive=sharing == "EXCLUSIVE" or fields.get("Exclusive") == "NODE",  # until and since Slurm 26.05
        jobs_per_cpu=_whole(sharing.removeprefix("FORCE:")) if sharing.startswith("FORCE:") else 1,
        nodes=nodes,
        cpus=_whole(tres.get("cpu", "")) or every,
        max_cpus_per_node=_limit(fields.get("MaxCPUsPerNode", "")),
        max_mem_per_node_mb=_limit(fields.get("MaxMemPerNode", "")),
        max_mem_per_cpu_mb=_limit(fields.get("MaxMemPerCPU", "")),
        job_defaults=dict(_pairs(fields.get("JobDefaults", ""))),
    )


def _fields(line: str) -> dict[str, str]:
    return dict(_split(word) for word in line.split() if "=" in word)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    return (_split(part) for part in text.split(",") if "=" in part)


def _split(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


def _names(text: str) -> frozenset[str] | None:
    return None if text in ("ALL", "(null)") else frozenset(text.split(","))


def _denied(text: str) -> frozenset[str]:
    return frozenset() if text in ("", "NONE", "(null)") else frozenset(text.split(","))


def _hosts(text: str) -> frozenset[str] | None:
    """Parse a hostlist of machines, or ALL."""
    try:
        return None if text in ("ALL", "(null)") else frozenset(expand_hostlist(text))
    except ValueError:
        return None


def _limit(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _whole(text: str) -> int:
    """Parse a number, which sinfo may write as a lower bound (`64+`)."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
