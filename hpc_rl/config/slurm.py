"""What a job asks of Slurm, and how this cluster wants to be asked."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hpc_rl.config.base import Line, Path, Section

_SLURM_TIME = re.compile(r"(\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}){0,2}|UNLIMITED|INFINITE)")


GpuOption = Literal["gpus-per-node", "gpus-per-task", "gres"]
MemOption = Literal["mem", "mem-per-gpu", "none"]
Omittable = Literal[
    "job-name", "ntasks-per-node", "ntasks", "cpus-per-task", "gpus-per-node", "gpus-per-task", "gres",
    "open-mode", "signal", "requeue", "no-requeue",
]  # fmt: skip
"""Directives of our own that nothing else rests on, but what their own manual says."""


class NodeConfig(Section):
    """The shape of this cluster's nodes: a part of a node's GPUs brings the same part of its CPUs and memory."""

    gpus: int | None = Field(None, ge=1)
    """GPUs of a node of this cluster; with cpus and mem_mb, what a job asks for where it does not say."""
    cpus: int | None = Field(None, ge=1)
    """CPUs of such a node: half of its GPUs bring half of these."""
    mem_mb: int | None = Field(None, ge=1)
    """Memory of such a node for jobs, in MB as Slurm counts (2^20 bytes): half of its GPUs bring half of it."""


class SlurmConfig(Section):
    job_name: Line | None = Field(None, min_length=1)
    """Job name; the run directory's name where null."""
    partition: Line | None = None
    """Partition (queue); Slurm's default where null."""
    group: Line | None = None
    """UNIX group that may read the run directory, its metrics and its exported model; null: you alone. Logs of attempts
    stay private."""
    test_partition: Line | None = None
    """Partition for short trials (`submit --test`), usually called debug or test; the job's own partition if null."""
    account: Line | None = None
    """Account that is charged."""
    qos: Line | None = None
    """Quality of service."""
    constraint: Line | None = None
    """Node features, as sbatch takes them."""
    time: Line | None = None
    """Walltime, quoted: "24:00:00" or "2-12:00:00"; the partition's default where null."""
    mem: Line | None = None
    """Memory per node, as sbatch takes it ("64G"; "0" for all of the node); by slurm.node where null."""
    cpus_per_task: int | None = Field(None, ge=1)
    """CPUs per node (one task runs on each); by cpus_per_gpu, or by slurm.node, or one per process where null."""
    cpus_per_gpu: int | None = Field(None, ge=1)
    """CPUs that come with each GPU, where cpus_per_task is null."""
    node: NodeConfig = NodeConfig()
    exclusive: bool = False
    """Whole nodes for this job alone: all of their CPUs and memory, however many GPUs it uses."""
    gpu_option: GpuOption = "gpus-per-node"
    """The sbatch option by which this cluster is asked for GPUs; gres is the one that every Slurm knows."""
    gpu_type: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Type of GPU to ask for, as `sinfo -o %G` names it (a100, or a MIG device such as a100_1g.5gb); any where null."""
    mem_option: MemOption = "mem"
    """The sbatch option by which this cluster is asked for memory; none: it gives memory by its own rule."""
    leave_out: list[Omittable] = []
    """Directives of the script that this cluster refuses."""
    warning_s: int = Field(180, ge=1, le=65535)
    """Seconds before the walltime at which the run saves and is queued again. Slurm may be a minute early."""
    requeue: bool = True
    """Queue the job again when the walltime stopped it, or a node failed."""
    sbatch: dict[str, Line | int | None] = {}
    """Any other sbatch option (--sbatch key=value); null for an option without a value."""
    setup: list[str] = []
    """Prologue: lines of bash that run on the first node before the step, after the modules."""
    epilogue: list[str] = []
    """Lines of bash that run on the first node at the end of every attempt, however it ended."""
    modules: list[Line] = []
    """Environment modules that the job loads, in this order (cuda/12.4)."""
    proxy: Line | None = None
    """Proxy by which compute nodes reach the internet (http://proxy:3128): http_proxy and https_proxy of the job."""
    env: dict[str, str] = {}
    """Environment variables of the job."""
    python: Path | None = None
    """Python that runs on the nodes; the one that runs hpc-rl where null."""
    interface: Line | None = None
    """Network interface between the nodes (ib0, hsn0); the default route's where null."""
    start_timeout_s: int = Field(300, ge=1)
    """Seconds in which all nodes must have met."""

    @field_validator("time", mode="before")
    @classmethod
    def _quoted_time(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            raise ValueError(
                f'{value} is a number: YAML turns an unquoted 24:00:00 into 86400; quote it (time: "24:00:00")'
            )
        return value

    @field_validator("time")
    @classmethod
    def _slurm_time(cls, value: str | None) -> str | None:
        if value is not None and not _SLURM_TIME.fullmatch(value):
            raise ValueError(f"{value!r} is no Slurm time: minutes, HH:MM:SS or D-HH:MM:SS")
        return value

    @model_validator(mode="after")
    def _warned_in_time(self) -> SlurmConfig:
        seconds = None if self.time is None else walltime_s(self.time)
        if seconds is not None and seconds <= self.warning_s:
            raise ValueError(
                f"the walltime {self.time} is {seconds} s, and the run would be told to save {self.warning_s} s before "
                "its end: ask for more time or lower slurm.warning_s"
            )
        return self

    @model_validator(mode="after")
    def _memory_by_its_option(self) -> SlurmConfig:
        if self.mem is None or self.mem_option == "mem":
            return self
        if self.mem_option == "none":
            raise ValueError(
                f"slurm.mem is {self.mem}, but slurm.mem_option=none: leave mem out, or use mem_option=mem"
            )
        if not memory_mb(self.mem):
            raise ValueError(
                f"slurm.mem is {self.mem!r}, and slurm.mem_option=mem-per-gpu divides it by the GPUs: write a size, "
                "such as 64G"
            )
        return self

    @field_validator("sbatch", mode="before")
    @classmethod
    def _no_booleans(cls, value: Any) -> Any:
        for key, one in value.items() if isinstance(value, dict) else ():
            if isinstance(one, bool):
                raise ValueError(f"{key} is {str(one).lower()}: write null for an option without a value")
        return value

    @field_validator("sbatch")
    @classmethod
    def _known_form(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
                raise ValueError(f"{key!r} is no long sbatch option (write exclusive, not --exclusive)")
            if key in _OWNED:
                raise ValueError(f"{key!r} is set by hpc-rl itself: {_OWNED[key]}")
        return value

    @field_validator("env")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        for key in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
                raise ValueError(f"{key!r} is no name of an environment variable")
        return value


_OWNED = {
    "nodes": "use --nodes",
    "ntasks": "one task runs on each node",
    "ntasks-per-node": "one task runs on each node",
    "output": "the job's log is in the run directory",
    "open-mode": "the job's log is in the run directory",
    "signal": "use slurm.warning_s",
    "requeue": "use slurm.requeue",
    "no-requeue": "use slurm.requeue",
    "array": "one run directory holds one job",
    "chdir": "the script changes to the folder that it is submitted from",
    "error": "the job's log is in the run directory",
    "parsable": "hpc-rl reads sbatch's answer",
    "quiet": "hpc-rl reads sbatch's answer",
    "test-only": "use --dry-run",
    "wait": "use hpc-rl submit --wait",
    "wrap": "the script is hpc-rl's",
    "job-name": "use --job-name",
    "partition": "use --partition",
    "account": "use --account",
    "qos": "use --qos",
    "constraint": "use --constraint",
    "time": "use --time",
    "mem": "use --mem",
    "cpus-per-task": "use --cpus-per-task",
}


def walltime_s(text: str) -> int | None:
    """Seconds of a Slurm time: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S (sbatch's manual page); None: no limit."""
    if not text[0].isdigit():
        return None
    days, dash, rest = text.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def memory_mb(text: str) -> int | None:
    """Whole MB of a size in sbatch's form (`--mem`: a number with K, M, G or T, M where none); None: no size."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip().upper())
    if not match:
        return None
    exponent = {"K": -1, "M": 0, "": 0, "G": 1, "T": 2}[match[2]]
    return int(int(match[1]) * 1024.0**exponent)
