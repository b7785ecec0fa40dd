"""What `hpc-rl doctor --on-nodes` finds on a node. Nodes write the reports; the login node evaluates them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_rl.system.files import read_regular, write_atomically
from hpc_rl.system.machine import PythonFacts


@dataclass(frozen=True)
class Trial:
    """The outcome of a test that all nodes ran together."""

    seconds: float
    exit_code: int
    """124 if the test took too long."""
    result: dict[str, Any]
    """What the test wrote on the first node. Empty if it failed."""
    said: str
    """The error message, if it failed."""


@dataclass(frozen=True)
class NodeReport:
    """Facts about one node of the job."""

    node: str
    rank: int
    nodes: int
    """Nodes of the job."""
    missing: list[str]
    """Nodes that did not start in time. Only the first node fills this in."""
    device: str
    """torch's name of the device that the job is to use, such as cuda or cpu."""
    processes: int
    """GPUs, or CPU processes, that the job uses on each node."""
    environ: dict[str, str]
    """The relevant variables of the job's step, such as SLURM_*, CUDA_VISIBLE_DEVICES and offline settings."""
    python: PythonFacts
    round_trip_s: float | None
    """On the first node: seconds until every other node has answered a file with a file. None on the others, and for a
    single node."""
    file_latency_s: float
    gpu_driver: str
    """Version; empty without a driver."""
    gpus: list[str]
    """Names of the GPUs that nvidia-smi or the amdgpu driver lists."""
    cpus: int
    memory: int
    """Bytes that cgroups and Slurm allow the job on this node."""
    shm_total: int
    shm_free: int
    """Bytes in /dev/shm."""
    open_files: int
    """Hard limit; -1 for no limit."""
    locked_memory: int
    """Soft limit in bytes; -1 for no limit."""
    interfaces: dict[str, str]
    """Name -> IPv4 address."""
    interface: str
    """The interface that a job would use, or an empty text."""
    interface_problem: str
    ports_problem: str
    """Why Ray would not get the ports that it needs, or an empty text."""
    scratch: str
    scratch_free: int
    runtimes: list[str]
    """Container runtimes on PATH."""
    internet: dict[str, str]
    """The result of `hpc_rl.system.machine.reach`."""
    all_reduce: Trial | None = None
    """None if torch is missing."""
    ray: Trial | None = None
    """None if Ray is missing or has no token authentication."""
    gpu_links: str = ""
    """How pairs of its GPUs are connected, such as `28 x NV18`; empty if it is unknown."""
    sees_locks: bool | None = None
    """Whether this node sees a file lock of the first node in the run directory. None on the first node."""
    scratch_problem: str = ""
    """Why files in TMPDIR, or in /tmp, cannot be executed or locked; empty if they can."""

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> NodeReport:
        """Read a report that `write` wrote."""
        facts: dict[str, Any] = json.loads(read_regular(path))
        nested = {"python": PythonFacts.of_json(facts["python"])}
        trials = {name: _trial(facts[name]) for name in ("all_reduce", "ray")}
        return cls(**{**facts, **nested, **trials})


def report_path(attempt_dir: Path, rank: int) -> Path:
    """Return the path of a node's report."""
    return attempt_dir / f"node{rank}.report.json"


def _trial(facts: Mapping[str, Any] | None) -> Trial | None:
    return None if facts is None else Trial(**facts)
