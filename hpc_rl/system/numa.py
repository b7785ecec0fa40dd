"""Keep each process on the CPUs next to its GPU, as `torchrun --numa-binding=node` does, for torchrun and Ray alike.

The node entry looks once which CPUs are near which GPU and passes that to the processes in a variable. It needs neither
numactl nor a CUDA context.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpc_rl.system.accelerators import visible_devices

ENV_NUMA = "HPC_RL_NUMA"
"""`GPU=CPUs;...`, such as `0=0-31;1=32-63`. Empty: processes are not bound."""
TIMEOUT_S = 20
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")


def numa_defaults(environ: Mapping[str, str], device: str, sys: Path = Path("/sys")) -> dict[str, str]:
    """Return the variable for the processes of this node; empty if nothing is to be bound.

    That is so if the job has only a part of the node's CPUs, which Slurm has chosen; if there is only one NUMA node;
    and for devices other than NVIDIA's, whose order the kernel does not show.
    """
    own = os.sched_getaffinity(0)
    if device != "cuda" or shutil.which(_QUERY[0], path=environ.get("PATH")) is None or not own >= online_cpus(sys):
        return {}
    try:
        done = subprocess.run(_QUERY, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    visible = visible_devices(environ, device)
    near: dict[str, str] = {}
    for line in done.stdout.splitlines():
        words = [word.strip() for word in line.split(",")]
        if done.returncode == 0 and len(words) == 3 and (cpus := cpus_near(words[2], sys)):
            near |= {name: cpus for name in words[:2] if (name in visible if visible is not None else name.isdigit())}
    apart = {name: cpus for name, cpus in near.items() if parse_cpus(cpus) & own not in (set(), own)}
    return {ENV_NUMA: ";".join(f"{name}={cpus}" for name, cpus in apart.items())} if apart else {}


def bind_near(environ: Mapping[str, str], gpu: str) -> None:
    """Keep all threads of this process, and processes that it starts, on the CPUs next to its GPU.

    Args:
        gpu: its name in CUDA_VISIBLE_DEVICES, or its index.
    """
    near = dict(entry.split("=", 1) for entry in environ.get(ENV_NUMA, "").split(";") if "=" in entry)
    if gpu not in near:
        return
    cpus = parse_cpus(near[gpu])
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended, or the CPUs are not this process's
            os.sched_setaffinity(int(thread.name), cpus)


def gpu_of_rank(environ: Mapping[str, str], local_rank: int) -> str:
    """Return the name of the GPU that a rank of torchrun uses."""
    visible = visible_devices(environ, "cuda")
    return visible[local_rank] if visible and local_rank < len(visible) else str(local_rank)


def cpus_near(bus_id: str, sys: Path) -> str:
    """Return the kernel's list of the CPUs next to a PCI device; empty if it is not known.

    Args:
        bus_id: as nvidia-smi prints it, 00000000:3B:00.0; the kernel's domain has four digits.
    """
    name = bus_id.lower()[-len("0000:3b:00.0") :]
    with contextlib.suppress(OSError):
        return (sys / "bus" / "pci" / "devices" / name / "local_cpulist").read_text().strip()
    return ""


def online_cpus(sys: Path) -> set[int]:
    """Return the CPUs of this machine."""
    return parse_cpus((sys / "devices" / "system" / "cpu" / "online").read_text())


def parse_cpus(text: str) -> set[int]:
    """Parse a list of CPUs such as 0-3,8 (cpuset(7), List format)."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found
