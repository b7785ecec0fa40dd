"""The specification of a sandbox cluster, in Slurm's terms."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

TMP = Path("/tmp")
PARTITIONS = {"debug": "Default=YES MaxTime=INFINITE", "short": "MaxTime=00:10:00 DefaultTime=00:01:00"}


def project_folders_in_tmp(places: Iterable[str | Path] | None = None) -> tuple[str, ...]:
    """Return the folders below /tmp that jobs need, without those inside another one.

    Args:
        places: by default this checkout, the Python environment and everything on `sys.path`.
    """
    if places is None:
        places = [Path(__file__).parents[2], sys.prefix, sys.base_prefix, *sys.path]
    folders = {folder for place in places if (folder := Path(place).resolve()).is_dir() and TMP in folder.parents}
    return tuple(sorted(str(folder) for folder in folders if not folders & set(folder.parents)))


@dataclass(frozen=True)
class Gpus:
    """Fake GPUs of one type on a node. A node may have several types, as if some of its GPUs were split by MIG."""

    count: int
    type: str = ""
    cores: str = ""
    """Their local cores, as in gres.conf. Slurm then appends the sockets to the count: gpu:a100:8(S:0-1)."""


@dataclass(frozen=True)
class Shape:
    """Identical nodes."""

    count: int
    cpus: int
    memory_mb: int
    """0 if it is not configured: Slurm then assumes 1 MB."""
    gpus: tuple[Gpus, ...] = ()
    sockets: int = 1
    features: str = ""
    prefix: str = "node"
    suffix: str = ""
    """Domain of fully qualified node names, such as .cluster.example."""
    runs: bool = True
    """Whether there is a machine with slurmd. Otherwise the controller only lists the node."""

    @property
    def gres(self) -> str:
        """Generic resources as in slurm.conf, such as gpu:a100:4,gpu:a100_1g.5gb:7."""
        return ",".join(f"gpu:{gpus.type}:{gpus.count}".replace("::", ":") for gpus in self.gpus)


@dataclass(frozen=True)
class Spec:
    """A cluster. All nodes are identical, unless there are `shapes`."""

    name: str
    nodes: int = 3
    cpus: int = 2
    memory_mb: int = 6000
    gpus: int = 0
    shapes: tuple[Shape, ...] = ()
    """Nodes of several kinds. They replace the four fields above."""
    accounting: bool = False
    accounts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """User -> accounts, the default one first. With accounting, jobs under other accounts are rejected."""
    partitions: Mapping[str, str] = field(default_factory=lambda: dict(PARTITIONS))
    """Partition name -> options after `PartitionName=...`. Without `Nodes=` it contains all nodes."""
    memory_allocated: bool = True
    """Whether Slurm allocates memory to jobs."""
    binds_cores: bool = True
    """Whether jobs are bound to the cores that Slurm gives them. All nodes run on the cores of this machine, and
    each gives its first job the first one."""
    second_network: str = ""
    """Name of a second interface on every node, such as ib0, on its own subnet."""
    tree: str = ""
    """Root directory of another Debian whose Slurm is used. Empty for that of this machine."""
    kill_wait_s: int = 30
    """Seconds between SIGTERM and SIGKILL for a job that is cancelled or over its time limit."""
    requeue_hold_s: int = 5
    """Seconds for which Slurm holds a requeued job (120 on most clusters). Started earlier, it is requeued again."""
    slurmd_timeout_s: int = 20
    """Seconds of silence after which the controller marks a node as down."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Further settings in slurm.conf."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files next to slurm.conf: name -> text. They are executable, and slurm.conf names a `task_prolog.sh`."""
    qos: tuple[str, ...] = ()
    """Qualities of service that every user may have, in addition to `normal`."""
    shared_tmp: tuple[str, ...] = field(default_factory=lambda: project_folders_in_tmp())
    """Folders below the host's /tmp that every node sees. The rest of a node's /tmp is its own."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        # The sandbox of another checkout may have further fields.
        shapes = [
            Shape(
                **{name: value for name, value in shape.items() if name in Shape.__dataclass_fields__}
                | {"gpus": tuple(Gpus(**gpus) for gpus in shape["gpus"])}
            )
            for shape in fields.get("shapes", ())
        ]
        fields = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        return cls(**fields | {"shapes": tuple(shapes), "shared_tmp": tuple(fields.get("shared_tmp", ()))})

    @property
    def group(self) -> str:
        return f"hpc-rl-sandbox-{self.name}"

    @property
    def base(self) -> Path:
        return Path("/var/tmp") / self.group

    @property
    def all_shapes(self) -> tuple[Shape, ...]:
        gpus = (Gpus(self.gpus),) if self.gpus else ()
        return self.shapes or (Shape(self.nodes, self.cpus, self.memory_mb, gpus),)

    @property
    def node_names(self) -> list[str]:
        """Names of the running nodes, beginning with node1."""
        return [name for shape, names in self.named_shapes() if shape.runs for name in names]

    def named_shapes(self) -> list[tuple[Shape, list[str]]]:
        """Return every shape with its nodes' names. The numbering continues from one shape to the next."""
        found: list[tuple[Shape, list[str]]] = []
        number = 1
        for shape in self.all_shapes:
            found.append((shape, [f"{shape.prefix}{number + step}{shape.suffix}" for step in range(shape.count)]))
            number += shape.count
        return found
