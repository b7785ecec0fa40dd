"""Facts about a node, and about what the job may use there."""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.formats.node_report import NodeReport
from hpc_rl.node.network import interface_addresses
from hpc_rl.node.ray_cluster.layout import node_address
from hpc_rl.node.ray_cluster.limits import cpu_quotas, memory_limits
from hpc_rl.node.ray_cluster.ports import reserve
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.system.cgroups import own_cgroups
from hpc_rl.system.machine import file_latency_s, internet_addresses, python_facts, reach
from hpc_rl.system.scratch import local_folder, local_folder_problem

RUNTIMES = ("apptainer", "singularity", "enroot", "podman")
SMI_TIMEOUT_S = 30
"""The first call on an idle node may have to load the driver."""
_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "WANDB_MODE",
    "APPTAINER_CONTAINER",
    "SINGULARITY_CONTAINER",
)
_SLURM_NAMES = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "SLURM_MEM_PER_NODE")


def node_facts(allocation: Allocation, attempt_dir: Path, options: argparse.Namespace) -> NodeReport:
    """Return this node's report, without the tests that all nodes run together."""
    groups = list(own_cgroups())
    shm = shutil.disk_usage("/dev/shm")
    scratch = local_folder(os.environ)
    interface, interface_problem = _interface(allocation, options.interface)
    driver, gpus = _gpus()
    return NodeReport(
        node=allocation.node,
        rank=allocation.node_rank,
        nodes=len(allocation.nodes),
        missing=[],
        device=options.device,
        processes=options.processes,
        environ={name: os.environ[name] for name in (*_NAMES, *_SLURM_NAMES) if name in os.environ},
        python=python_facts(),
        round_trip_s=None,
        file_latency_s=file_latency_s(attempt_dir),
        gpu_driver=driver,
        gpus=gpus,
        gpu_links=read_links(_smi("topo", "-m")),
        cpus=min([allocation.cpus, *cpu_quotas(groups)]),
        memory=min(memory_limits(groups, os.environ, allocation.cpus, Path("/proc"))),
        shm_total=shm.total,
        shm_free=shm.free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        interfaces=interface_addresses(),
        interface=interface,
        interface_problem=interface_problem,
        ports_problem=_ports_problem(options.first_port),
        scratch=str(scratch),
        scratch_free=shutil.disk_usage(scratch).free,
        scratch_problem=local_folder_problem(os.environ),
        runtimes=[name for name in RUNTIMES if shutil.which(name)],
        internet=reach(internet_addresses(os.environ)),
    )


def _interface(allocation: Allocation, configured: str | None) -> tuple[str, str]:
    try:
        return node_address(allocation, configured)[0], ""
    except UserError as error:
        return "", str(error)


def _ports_problem(first: int | None) -> str:
    """Reserve the ports that Ray would use and release them at once. Returns the problem, if any."""
    try:
        reserve(first, 0).close()
    except UserError as error:
        return str(error)
    return ""


def _gpus() -> tuple[str, list[str]]:
    """Return (driver version, names) of the GPUs that this task can see."""
    if shutil.which("nvidia-smi") is None:
        return read_kfd(Path("/sys"))
    return read_nvidia(_smi("--query-gpu=driver_version,name", "--format=csv,noheader"))


def _smi(*options: str) -> str:
    """Return the output of nvidia-smi; empty if there is none, or if it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *options], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read_links(text: str) -> str:
    """Parse `nvidia-smi topo -m`: a row and a column for each GPU, in which each pair has the name of its link.

    Returns:
        the number of pairs with each kind of link, such as `28 x NV18`.
    """
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in text.splitlines()]
    rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    kinds = [row[column + 1] for number, row in enumerate(rows) for column in range(number + 1, len(rows))]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))


def read_nvidia(text: str) -> tuple[str, list[str]]:
    """Parse `nvidia-smi --query-gpu=driver_version,name --format=csv,noheader`: one line for each GPU."""
    pairs = [line.split(", ", 1) for line in text.splitlines() if ", " in line]
    return (pairs[0][0], [name for _, name in pairs]) if pairs else ("", [])


def read_kfd(sys_folder: Path) -> tuple[str, list[str]]:
    """List AMD GPUs from the kernel's amdgpu driver: nodes with SIMD units in /sys/class/kfd/kfd/topology."""
    names = []
    for properties in sorted(sys_folder.glob("class/kfd/kfd/topology/nodes/*/properties")):
        fields = dict(line.split(" ", 1) for line in properties.read_text().splitlines() if " " in line)
        if int(fields.get("simd_count", 0)):
            names.append(f"gfx {fields.get('gfx_target_version', '?')}")
    version = sys_folder / "module/amdgpu/version"
    return (version.read_text().strip() if version.exists() else "amdgpu" if names else ""), names
