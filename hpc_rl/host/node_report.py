"""What the doctor finds out on a node of its job: written there, judged on the login node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_rl.host.machine import PythonFacts


@dataclass(frozen=True)
class Trial:
    """Something that was really done, by all nodes together."""

    seconds: float
    exit_code: int
    """124 where it took too long."""
    result: dict[str, Any]
    """What it wrote down, on the first node; empty where it failed."""
    said: str
    """Why it failed, in its own words."""


@dataclass(frozen=True)
class NodeReport:
    node: str
    rank: int
    nodes: int
    """Nodes of the job."""
    missing: list[str]
    """Nodes that the first one has waited for in vain."""
    device: str
    """cuda or cpu: what the job is asked to compute on."""
    processes: int
    """GPUs, or CPU processes, that it wants on a node."""
    environ: dict[str, str]
    """Of the job's step: SLURM_*, CUDA_VISIBLE_DEVICES, offline settings and others that matter."""
    python: PythonFacts
    round_trip_s: float | None
    """First node: until every other has answered a file with a file. None elsewhere, and for one node."""
    file_latency_s: float
    gpu_driver: str
    """Version, or nothing."""
    gpus: list[str]
    """Names of the GPUs that nvidia-smi or rocm-smi shows."""
    cpus: int
    memory: int
    """Bytes that cgroups and Slurm leave to the job here."""
    shm_total: int
    shm_free: int
    """Bytes in /dev/shm."""
    open_files: int
    """Hard limit; -1 for none, as with the next."""
    locked_memory: int
    """Soft limit, in bytes."""
    interfaces: dict[str, str]
    """Name -> IPv4 address."""
    interface: str
    """The one that a job would take, or nothing."""
    interface_problem: str
    ports_problem: str
    """Nothing where there are as many free ones as Ray wants."""
    scratch: str
    scratch_free: int
    runtimes: list[str]
    """Container runtimes on PATH."""
    internet: dict[str, str]
    """As `hpc_rl.host.machine.reach` returns it."""
    all_reduce: Trial | None = None
    """None where torch is missing."""
    ray: Trial | None = None
    """None where Ray is missing or not to be trusted."""

    def write(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> NodeReport:
        facts: dict[str, Any] = json.loads(path.read_text())
        nested = {"python": PythonFacts.of_json(facts["python"])}
        trials = {name: _trial(facts[name]) for name in ("all_reduce", "ray")}
        return cls(**{**facts, **nested, **trials})


def report_path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"node{rank}.report.json"


def _trial(facts: Mapping[str, Any] | None) -> Trial | None:
    return None if facts is None else Trial(**facts)
