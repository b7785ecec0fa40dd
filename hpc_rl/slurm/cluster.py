"""What a cluster is like, out of the text of sinfo, scontrol, sacctmgr and ip. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

SINFO_FORMAT = "%P|%a|%l|%L|%D|%c|%m|%G|%f|%h|%T"
"""Columns of sinfo that say what nodes are like, and none that names one: with -e, nodes that are alike share a line,
and a thousand nodes are a handful of lines."""
ASSOCIATION_COLUMNS = "Cluster,Account,User,Partition,QOS,DefaultQOS,MaxWall,MaxTRES"


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one partition that are alike."""

    partition: str
    nodes: int
    cpus: int
    """CPUs of each, as Slurm counts: hardware threads where it has them."""
    memory_mb: int
    """Memory of each; 1 where the cluster's administrator has not said."""
    gpus: Mapping[str, int]
    """GPUs of each: type -> how many; a GPU without a type has the type ''."""
    is_default: bool = False
    state: str = "up"
    """The partition's: up, down, drain or inactive (sinfo(1), AVAIL)."""
    time_limit: str = "infinite"
    features: tuple[str, ...] = ()

    @property
    def all_gpus(self) -> int:
        return sum(self.gpus.values())


@dataclass(frozen=True)
class Partition:
    """What `scontrol show partition` says beyond sinfo."""

    name: str
    is_default: bool
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    accounts: frozenset[str] | None
    """Accounts that may use it; None: all."""
    groups: frozenset[str] | None
    """UNIX groups that may use it; None: all."""
    is_hidden: bool
    """From those who do not ask for it by name."""
    max_time: str
    """In Slurm's form, or UNLIMITED."""
    default_time: str
    """What a job without --time gets; NONE for the maximum."""
    preempt_mode: str
    """OFF, REQUEUE, SUSPEND, ...: what happens to its jobs when others preempt them."""
    grace_s: int
    """Between a preemption's SIGTERM and its SIGKILL."""
    exclusive: bool
    """Jobs get whole nodes, asked for or not."""
    nodes: int
    cpus: int
    """CPUs of all nodes for jobs, without those that Slurm keeps for the system."""
    max_cpus_per_node: int | None
    max_mem_per_node_mb: int | None
    max_mem_per_cpu_mb: int | None
    job_defaults: Mapping[str, str] = field(default_factory=dict)
    """DefCpuPerGPU and DefMemPerGPU, where set."""


@dataclass(frozen=True)
class Association:
    """An account that the user may charge."""

    account: str
    partition: str
    """The one that it is for; empty: any."""
    qos: tuple[str, ...]
    max_time: str
    """In Slurm's form; empty: no limit of its own."""


def read_sinfo(text: str) -> list[NodeGroup]:
    """Output of `sinfo -h -e -o SINFO_FORMAT`; lines that differ in their nodes' state alone become one."""
    nodes: Counter[tuple[str, ...]] = Counter()
    for line in text.splitlines():
        columns = line.split("|")
        if len(columns) == 11:
            name, state, limit, _, count, cpus, memory, gres, features, *_ = columns
            nodes[name, state, limit, cpus, memory, gres, features] += _whole(count)
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
        )
        for (name, state, limit, cpus, memory, gres, features), count in nodes.items()
        if count
    ]


def parse_gpus(gres: str) -> dict[str, int]:
    """GPUs of a node's generic resources: `gpu:a100:8(S:0-1),nvme:1` -> {"a100": 8}; `gpu:2` -> {"": 2}.

    The sockets in parentheses may have commas (`(S:0,2)`). MIG devices have types like any other (`gpu:a100_1g.5gb:7`).
    """
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        match = re.fullmatch(
            r"gpu(?::(?!no_consume)([^:]+(?=:)|[^:]*[^:\d][^:]*))?(?::no_consume)?(?::(\d+))?", part.strip()
        )
        if match:
            found[match[1] or ""] = found.get(match[1] or "", 0) + int(match[2] or 1)
    return found


def read_partitions(text: str) -> list[Partition]:
    """Output of `scontrol show partition -o`."""
    return [_partition(fields) for fields in map(_fields, text.splitlines()) if "PartitionName" in fields]


def read_config(text: str) -> dict[str, str]:
    """Output of `scontrol show config`; what is not set ((null)) is left out."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs if value.strip() not in ("", "(null)")}


def has_accounting(config: Mapping[str, str]) -> bool:
    return not config.get("AccountingStorageType", "accounting_storage/none").endswith("/none")


def read_controllers(text: str) -> dict[str, bool]:
    """The last lines of the same output: host of a controller -> whether it is up."""
    return {host: state == "UP" for host, state in re.findall(r"^Slurmctld\([^)]*\) at (\S+) is (\w+)", text, re.M)}


def read_associations(text: str, cluster: str) -> list[Association]:
    """Output of `sacctmgr -nP show assoc user=NAME format=ASSOCIATION_COLUMNS`, for one cluster."""
    rows = (line.split("|") for line in text.splitlines())
    return [
        Association(row[1], row[3], tuple(filter(None, row[4].split(","))), row[6])
        for row in rows
        if len(row) == 8 and row[0] == cluster
    ]


def chosen(partitions: Sequence[Partition], name: str | None) -> Partition | None:
    """The partition that a job would go to; of several with commas the first that there is."""
    if name is None:
        return next((one for one in partitions if one.is_default), None)
    return next((one for wanted in name.split(",") for one in partitions if one.name == wanted), None)


def read_interfaces(text: str) -> dict[str, str]:
    """Output of `ip -o -4 addr`: interface -> IPv4 address, without the loopback."""
    found = re.findall(r"^\d+: (\S+)\s+inet ([\d.]+)", text, re.MULTILINE)
    return {name: address for name, address in found if not address.startswith("127.")}


def _partition(fields: Mapping[str, str]) -> Partition:
    tres = dict(_pairs(fields.get("TRES", "")))
    nodes, every = _whole(fields.get("TotalNodes", "")), _whole(fields.get("TotalCPUs", ""))
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        state=fields.get("State", "UP"),
        accounts=_names(fields.get("AllowAccounts", "ALL")),
        groups=_names(fields.get("AllowGroups", "ALL")),
        is_hidden=fields.get("Hidden") == "YES",
        max_time=fields.get("MaxTime", "UNLIMITED"),
        default_time=fields.get("DefaultTime", "NONE"),
        preempt_mode=fields.get("PreemptMode", "OFF"),
        grace_s=_whole(fields.get("GraceTime", "")),
        exclusive=fields.get("OverSubscribe") == "EXCLUSIVE",
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
    return None if text == "ALL" else frozenset(text.split(","))


def _limit(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _whole(text: str) -> int:
    """A number, of which sinfo may say that there are more than that (`64+`)."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
