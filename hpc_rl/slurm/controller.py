"""What Slurm's controller says of itself and its partitions: the text of scontrol and sacctmgr. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    name: str
    default: bool
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    max_time: str
    """As sbatch takes it, or UNLIMITED."""
    default_time: str
    """What a job without --time gets; NONE for the maximum."""
    preempt_mode: str
    """OFF, REQUEUE, SUSPEND, ...: what happens to its jobs when others preempt them."""
    grace_s: int
    """Between a preemption's SIGTERM and its SIGKILL."""
    nodes: int


def read_config(text: str) -> dict[str, str]:
    """Output of `scontrol show config`: its `Key = value` lines."""
    pairs = re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)
    return {key: "" if value == "(null)" else value for key, value in pairs}


def read_ping(text: str) -> dict[str, bool]:
    """The last lines of `scontrol show config`, which `scontrol ping` prints too: host of a controller -> is it up."""
    return {host: state == "UP" for host, state in re.findall(r"^Slurmctld\([^)]*\) at (\S+) is (\w+)", text, re.M)}


def read_partitions(text: str) -> list[Partition]:
    """Output of `scontrol show partition -o`: a line for each."""
    return [
        _partition(dict(re.findall(r"(\S+?)=(\S*)", line))) for line in text.splitlines() if "PartitionName=" in line
    ]


def read_associations(text: str) -> list[str]:
    """Accounts in the output of `sacctmgr -nP show assoc user=NAME format=account`."""
    return sorted({line.split("|")[0] for line in text.splitlines() if line.strip()})


def chosen(partitions: Sequence[Partition], name: str | None) -> Partition | None:
    """The partition that a job would go to; of several with commas the first that there is."""
    if name is None:
        return next((one for one in partitions if one.default), None)
    return next((one for wanted in name.split(",") for one in partitions if one.name == wanted), None)


def _partition(fields: Mapping[str, str]) -> Partition:
    return Partition(
        name=fields["PartitionName"],
        default=fields.get("Default") == "YES",
        state=fields.get("State", "UP"),
        max_time=fields.get("MaxTime", "UNLIMITED"),
        default_time=fields.get("DefaultTime", "NONE"),
        preempt_mode=fields.get("PreemptMode", "OFF"),
        grace_s=int(fields.get("GraceTime", "0")),
        nodes=int(fields.get("TotalNodes", "0")),
    )
