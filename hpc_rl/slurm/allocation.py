"""The allocation of this task, from the SLURM_* variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_rl.formats.counted import counted

MOST_NODES = 65_536
"""Names in a hostlist; Slurm itself expands no longer range."""
_MOST_GROUPS = 16
_TOO_MANY = f"the hostlist has more than {MOST_NODES:,} names"


@dataclass(frozen=True)
class Allocation:
    """One task's view of its job step (srun's manual page, OUTPUT ENVIRONMENT VARIABLES)."""

    job_id: str
    restart: int
    """How often Slurm has requeued the job."""
    nodes: tuple[str, ...]
    """Node names in Slurm's order. Node 0 hosts the rendezvous."""
    node_rank: int
    cpus: int
    """CPUs on this node that the job may use."""

    @property
    def node(self) -> str:
        """Name of this node."""
        return self.nodes[self.node_rank]

    @property
    def is_head(self) -> bool:
        """Whether this is node 0."""
        return self.node_rank == 0

    def threads(self, processes: int) -> int:
        """Return the threads of each of this node's processes, which share its CPUs equally; at least 1."""
        return max(1, self.cpus // processes)


def read_allocation(environ: Mapping[str, str], affinity: int) -> Allocation:
    """Return the allocation that the SLURM_* variables describe.

    Args:
        affinity: number of CPUs in this process's affinity mask. Inside a step SLURM_CPUS_PER_TASK can be outdated, so
            the smaller of the mask and SLURM_CPUS_ON_NODE is used.

    Raises:
        ValueError: a variable is missing or malformed. The message names it.
    """
    nodes = expand_hostlist(_required(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    rank = int(_required(environ, "SLURM_NODEID"))
    if not 0 <= rank < len(nodes):
        raise ValueError(f"SLURM_NODEID is {rank}, but the step has {counted(len(nodes), 'node')}")
    granted = int(environ.get("SLURM_CPUS_ON_NODE") or affinity)
    return Allocation(
        job_id=_required(environ, "SLURM_JOB_ID"),
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
        nodes=nodes,
        node_rank=rank,
        cpus=max(1, min(granted, affinity)),
    )


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expand a hostlist of Slurm: `gpu[01-03,7],login` -> gpu01 gpu02 gpu03 gpu7 login.

    Several bracket groups in one name are combined (`r[1-2]n[1-2]`); the last one varies fastest.

    Raises:
        ValueError: the brackets are unbalanced or the list is empty.
    """
    if text.count("[") != text.count("]") or re.search(r"\[[^\]]*\[", text):
        raise ValueError(f"{text!r} is not a hostlist: its brackets do not match")
    names: list[str] = []
    for part in re.findall(r"(?:[^\[,]++|\[[^\[\]]*+\])++", text):
        if part.strip():
            names += _expand_one(part.strip(), MOST_NODES - len(names))
    if not names:
        raise ValueError("the hostlist is empty")
    return tuple(names)


def _required(environ: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environ.get(name):
            return environ[name]
    raise ValueError(f"{names[-1]} is not set: start this in a Slurm step (srun), or with `hpc-rl submit --local`")


def _expand_one(part: str, most: int) -> list[str]:
    names = [""]
    pieces = re.split(r"\[([^\[\]]*)\]", part)
    if len(pieces) // 2 > _MOST_GROUPS:
        raise ValueError(f"a name of the hostlist has more than {_MOST_GROUPS} brackets")
    for number, piece in enumerate(pieces):
        choices = _expand_ranges(piece, most) if number % 2 else [piece]
        if len(names) * len(choices) > most:
            raise ValueError(_TOO_MANY)
        names = [name + choice for name in names for choice in choices]
    return names


def _expand_ranges(text: str, most: int) -> list[str]:
    indices: list[str] = []
    for item in text.split(","):
        bounds = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", item.strip())
        if not bounds:
            raise ValueError(f"{item[:40]!r} is not a range of a hostlist")
        first, last = bounds[1], bounds[2] or bounds[1]
        if len(indices) + int(last) - int(first) >= most:
            raise ValueError(_TOO_MANY)
        indices += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return indices
