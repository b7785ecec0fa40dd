"""Options of Slurm: the resources that a job requests, and the conventions of the cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from hpc_rl.config.base import Line, Path, Section

_SLURM_TIME = re.compile(r"(\d+|\d+:\d{2}|\d+:\d{2}:\d{2}|\d+-\d{1,2}(:\d{2}){0,2}|UNLIMITED|INFINITE)")

GpuOption = Literal["gpus-per-node", "gpus-per-task", "gres"]
MemOption = Literal["mem", "mem-per-cpu", "mem-per-gpu", "none"]
TaskOption = Literal["ntasks-per-node", "ntasks", "both"]
Omittable = Literal[
    "job-name", "ntasks-per-node", "ntasks", "cpus-per-task", "gpus-per-node", "gpus-per-task", "gres",
    "open-mode", "signal", "requeue", "no-requeue",
]  # fmt: skip
"""Directives that hpc-rl writes and that it can do without."""


def _absolute(folder: str) -> str:
    if not folder.startswith("/"):
        raise ValueError(f"{folder} is not a full path, such as /local/data")
    return folder


class NodeConfig(Section):
    """The size of this cluster's nodes. A job that uses a fraction of a node's GPUs gets that fraction of the rest."""

    gpus: int | None = Field(None, ge=1)
    """GPUs of one node of this cluster. Jobs that do not set cpus_per_task and mem request both in proportion to their
    GPUs."""
    cpus: int | None = Field(None, ge=1)
    """CPUs of one node of this cluster. A job on half of a node's GPUs requests half of them."""
    mem_mb: int | None = Field(None, ge=1)
    """Memory of one node that jobs may use, in MB (2^20 bytes, as Slurm counts). A job on half of a node's GPUs
    requests half of it."""
    gpu_gb: float | None = Field(None, gt=0)
    """Memory of one GPU, in 10^9 bytes, such as 80. `hpc-rl plan` and `submit` compare it with what a job needs. null:
    from slurm.gpu_type, if that name tells it (h100, a100_80gb)."""


class SlurmConfig(Section):
    job_name: Line | None = Field(None, min_length=1)
    """Name of the job and of its run directory. null: the first free one of KIND-1, KIND-2 and so on."""
    partition: Line | None = None
    """Partition (queue). null: Slurm's default partition."""
    group: Line | None = None
    """UNIX group that may read the run directory, its metrics and its exported model. The logs of its attempts stay
    private. The members of the group are trusted: they may own the folders above the run directory. null: no group."""
    test_partition: Line | None = None
    """Partition for short trials (`submit --test`), usually called debug or test. null: the job's own partition."""
    account: Line | None = None
    """Account to charge. null: Slurm's default account of the user."""
    qos: Line | None = None
    """Quality of service. null: Slurm's default."""
    constraint: Line | None = None
    """Required node features, as in sbatch's --constraint."""
    time: Line | None = None
    """Walltime, in quotes: "24:00:00" or "2-12:00:00". null: the partition's default."""
    mem: Line | None = None
    """Memory per node, as in sbatch's --mem: a whole number with K, M, G or T, such as "64G"; "0" for all memory of a
    node. null: in proportion to the GPUs if slurm.node gives the size of a node, otherwise Slurm's default."""
    cpus_per_task: int | None = Field(None, ge=1)
    """CPUs per node (one task runs on each node). null: from cpus_per_gpu or slurm.node, otherwise one per process."""
    cpus_per_gpu: int | None = Field(None, ge=1)
    """CPUs to request for each GPU if cpus_per_task is null."""
    node: NodeConfig = NodeConfig()
    exclusive: bool = False
    """Request whole nodes with all their CPUs and memory, regardless of the number of GPUs in use."""
    gpu_option: GpuOption = "gpus-per-node"
    """Option of sbatch that requests GPUs on this cluster. Every version of Slurm supports gres."""
    gpu_type: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Type of GPU to request, as `sinfo -o %G` shows it (a100, or a MIG device such as a100_1g.5gb). null: any."""
    mem_option: MemOption = "mem"
    """Option of sbatch that requests memory on this cluster. none: the cluster assigns memory by its own rules."""
    task_option: TaskOption = "ntasks-per-node"
    """Option of sbatch that requests one task on each node on this cluster. both: --ntasks and --ntasks-per-node."""
    login_shell: bool = False
    """Run the job script in a login shell (#!/bin/bash -l), which reads /etc/profile and your own profile."""
    leave_out: list[Omittable] = []
    """Directives to leave out of the script because this cluster refuses them."""
    warning_s: int = Field(180, ge=1, le=65535)
    """Seconds before the end of the walltime at which the run is told to save; it is then queued again. Slurm may send
    the warning up to a minute early. A run whose steps and checkpoints have taken longer saves earlier by itself."""
    adapter: Line = "auto"
    """Adapter by which hpc-rl asks your own program to save, and resumes it (`submit torchrun`, `submit ray`): trl,
    lightning, verl or another name in docs/other-programs.md. auto: chosen by the command line. none: the program looks
    for the stop file itself."""
    requeue: bool = True
    """Queue the job again after it reached its walltime, was preempted, hung once, or lost a node."""
    max_node_failures: int = Field(3, ge=0)
    """Number of times that a job is queued again after it has lost a node, without that node. 0: never."""
    sbatch: dict[str, Line | int | None] = {}
    """Any other options of sbatch. For an option without a value, write null. Same as --sbatch KEY=VALUE."""
    setup: list[str] = []
    """Lines of bash that run on the first node before the job step, after the modules are loaded. If one fails, the job
    ends with exit code 2; end a line with `|| true` if it may fail."""
    node_folders: list[Annotated[Path, AfterValidator(_absolute)]] = []
    """Folders that exist on the nodes only, such as those that slurm.setup fills. Options may name files and folders
    below them that this machine does not have: they are not checked before the job is queued."""
    epilogue: list[str] = []
    """Lines of bash that run on the first node at the end of every attempt, whatever its result."""
    modules: list[Line] = []
    """Environment modules that the job loads, in this order (cuda/12.4)."""
    module_paths: list[Line] = []
    """Folders of modulefiles that the job adds to the search path (`module use`) before it loads the modules."""
    proxy: Line | None = None
    """Proxy through which compute nodes reach the internet (http://proxy:3128). It sets http_proxy and https_proxy."""
    env: dict[str, str] = {}
    """Environment variables of the job."""
    python: Path | None = None
    """Python interpreter on the nodes. null: the one that runs hpc-rl."""
    interface: Line | None = None
    """Network interface between the nodes (ib0, hsn0). null: that of the default route."""
    start_timeout_s: int = Field(300, ge=1)
    """Deadline in seconds for the first task of the job to start, and again for all nodes to connect to each other."""

    @field_validator("time", mode="before")
    @classmethod
    def _quoted_time(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            raise ValueError(
                f'{value} is a number: YAML reads an unquoted 24:00:00 as 86400, so quote it (time: "24:00:00")'
            )
        return value

    @field_validator("time")
    @classmethod
    def _slurm_time(cls, value: str | None) -> str | None:
        if value is not None and not _SLURM_TIME.fullmatch(value):
            raise ValueError(f"{value!r} is not a Slurm time: write minutes, HH:MM:SS or D-HH:MM:SS")
        return value

    @field_validator("mem")
    @classmethod
    def _slurm_size(cls, value: str | None) -> str | None:
        if value is not None and memory_mb(value) is None:
            raise ValueError(
                f"{value!r} is not a size that sbatch accepts: write a whole number with K, M, G or T, such as 64G, or "
                "0 for all memory of a node"
            )
        return value

    @property
    def clusters(self) -> str:
        """The value of --clusters; empty for the local cluster."""
        return str(self.sbatch.get("clusters") or "")

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
        for key, one in value.items():
            if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
                raise ValueError(f"{key!r} is not a long option of sbatch (write exclusive, not --exclusive or -x)")
            if key in _OWNED:
                raise ValueError(f"{key!r} is set by hpc-rl itself: {_OWNED[key]}")
            if key in ("mem-per-cpu", "mem-per-gpu") and memory_mb(str(one)) is None:
                raise ValueError(f"{key} is {one!r}, which is not a size that sbatch accepts, such as 4G")
        return value

    @field_validator("env")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        for key, text in value.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
                raise ValueError(f"{key!r} is not the name of an environment variable")
            if "\0" in text:
                raise ValueError(f"{key}: an environment variable cannot contain a NUL character")
        return value

    def problems(self) -> Iterator[str]:
        yield from self._walltime_problems()
        yield from self._memory_problems()

    def _walltime_problems(self) -> Iterator[str]:
        seconds = None if self.time is None else walltime_s(self.time)
        if seconds is not None and seconds <= self.warning_s:
            yield (
                f"the walltime {self.time} is {seconds} s, but the run saves {self.warning_s} s before "
                "its end: ask for more time or lower slurm.warning_s"
            )

    def _memory_problems(self) -> Iterator[str]:
        if self.mem is None or self.mem_option == "mem":
            return
        if self.mem_option == "none":
            yield f"slurm.mem is {self.mem}, but slurm.mem_option=none: leave mem out, or use mem_option=mem"
        elif not memory_mb(self.mem):
            yield (
                f"slurm.mem is {self.mem!r}, which slurm.mem_option={self.mem_option} cannot divide: write a size, "
                "such as 64G"
            )


_OWNED = {
    "nodes": "use --nodes",
    "ntasks": "one task runs on each node; use slurm.task_option",
    "ntasks-per-node": "one task runs on each node; use slurm.task_option",
    "output": "the job's log is in the run directory",
    "open-mode": "the job's log is in the run directory",
    "signal": "use slurm.warning_s",
    "requeue": "use slurm.requeue",
    "no-requeue": "use slurm.requeue",
    "array": "use hpc-rl sweep",
    "chdir": "the job runs in the folder that it is submitted from",
    "error": "the job's log is in the run directory",
    "parsable": "hpc-rl reads the output of sbatch",
    "quiet": "hpc-rl reads the output of sbatch",
    "test-only": "use --dry-run",
    "wait": "use hpc-rl submit --wait",
    "wrap": "hpc-rl writes the script",
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
    """Return the seconds of a Slurm time, or None if it is unlimited.

    Args:
        text: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S (sbatch(1), --time).
    """
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
    """Return the whole MB (2^20 bytes) of a size, or None if sbatch would reject it.

    Args:
        text: a whole number with K, M, G or T, optionally followed by B; in MB without a unit (sbatch(1), --mem).
    """
    match = re.fullmatch(r"(\d+)(?:([KMGT])B?)?", text.upper())
    if not match or int(match[1]) >= 2**63:  # Slurm reads it into a signed 64-bit integer
        return None
    exponent = {"K": -1, "M": 0, None: 0, "G": 1, "T": 2}[match[2]]
    return int(int(match[1]) * 1024.0**exponent)
