"""The layout of Ray on one node: address, ports, temporary folder, and the resources that it may use."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.node.entry import repaired, worker_defaults
from hpc_rl.node.network import choose_address
from hpc_rl.node.ray_cluster.environment import shared_environment
from hpc_rl.node.ray_cluster.limits import RayResources, ray_resources
from hpc_rl.node.ray_cluster.ports import RayPorts, reserve
from hpc_rl.node.ray_cluster.start import StartOptions
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.software.jit_caches import jit_cache_defaults
from hpc_rl.software.ray_token import TOKEN
from hpc_rl.software.ray_version import check_ray, installed_ray
from hpc_rl.system.accelerators import ray_resource
from hpc_rl.system.numa import numa_defaults
from hpc_rl.system.scratch import job_scratch, local_folder, new_name

SOCKET_BYTES = 107
"""Longest path of a UNIX socket (unix(7))."""
_SESSION = "session_2026-01-02_03-04-05_678901_1234567/sockets"
LONGEST_SOCKET, LONGEST_DASHBOARD_SOCKET = f"{_SESSION}/plasma_store", f"{_SESSION}/dash_TaskEventsHead"
"""Ray's part of that path, without and with its dashboard."""


@dataclass(frozen=True)
class NodeLayout:
    """What Ray's processes on this node are started with."""

    allocation: Allocation
    device: str
    """torch's name of the devices that Ray gets."""
    interface: str
    address: str
    ports: RayPorts
    grant: RayResources
    scratch: Path
    """Private folder for everything that the job writes on this node's own disk."""
    token: Path
    """File in the attempt's folder, which is private."""

    @property
    def temp_dir(self) -> Path:
        """Ray's own folder. Ray makes it accessible to everyone, so it is inside a private one."""
        return _temp_dir(self.scratch)

    def start_options(self, gcs_address: str, dashboard: bool) -> StartOptions:
        """Return the options of this node's Ray processes."""
        return StartOptions(
            head=self.allocation.is_head,
            gcs_address=gcs_address,
            address=self.address,
            name=f"{self.allocation.node}.{self.allocation.node_rank}",
            temp_dir=str(self.temp_dir),
            num_cpus=self.grant.cpus,
            num_gpus=self.grant.gpus,
            gpu_resource=ray_resource(self.device),
            memory=self.grant.memory,
            object_store_memory=self.grant.object_store,
            services=self.ports.services(dashboard),
            worker_ports=self.ports.workers,
            dashboard=dashboard,
            dashboard_port=self.ports.dashboard,
        )

    def environment(self, options: argparse.Namespace) -> dict[str, str]:
        """Return the variables that Ray's processes and the driver share."""
        threads = self.allocation.threads(options.processes)
        workers = worker_defaults(self.device, self.interface, options.interface, threads)
        environ = repaired(os.environ, self.device, self.interface, self.allocation, self.address)
        return shared_environment(
            environ,
            {**workers, **jit_cache_defaults(environ, self.scratch), **numa_defaults(environ, self.device)},
            token=self.token,
            scratch=self.scratch,
            temp_dir=self.temp_dir,
            timeline=options.timeline is not None,
            start_timeout_s=options.start_timeout,
        )


@contextmanager
def prepared_layout(allocation: Allocation, attempt_dir: Path, options: argparse.Namespace) -> Iterator[NodeLayout]:
    """Reserve ports and create a temporary folder for this job, until the end.

    Raises:
        UserError: something that Ray needs is missing or occupied.
    """
    check_ray(installed_ray(), sys.executable)
    rank = allocation.node_rank
    interface, address = node_address(allocation, options.interface, options.joinable)
    planned = local_folder(os.environ) / new_name(allocation.job_id)
    environ = with_room_for_sockets(os.environ, planned, allocation.node, options.dashboard)
    grant = ray_resources(
        allocation,
        os.environ,
        most_cpus=options.num_cpus,
        device=options.device,
        gpus=0 if options.device == "cpu" else options.processes,
        object_store=options.object_store_bytes,
    )
    before = allocation.nodes[:rank].count(allocation.node)
    with (
        reserve(options.first_port, before) as blocks,
        job_scratch(environ, allocation.job_id, attempt_dir, rank) as scratch,
    ):
        ports = RayPorts(blocks.firsts)
        token = attempt_dir / TOKEN
        yield NodeLayout(allocation, options.device, interface, address, ports, grant, scratch, token)


def node_address(allocation: Allocation, configured: str | None, joinable: bool = False) -> tuple[str, str]:
    """Return (interface, address) of this node.

    Args:
        joinable: whether nodes of other jobs reach it, also if this job is on one machine.

    A job on one machine uses the loopback, with one address for each node. None of them is 127.0.0.1, because Ray's
    drivers would replace it by another address of the machine.
    """
    others = [name for name in allocation.nodes if name != allocation.node]
    peer = others[0] if others else allocation.node if joinable else None
    interface, address = choose_address(configured, peer)
    if address == "127.0.0.1":
        address = f"127.0.{allocation.node_rank // 250}.{allocation.node_rank % 250 + 2}"
    return interface, address


def with_room_for_sockets(environ: Mapping[str, str], scratch: Path, node: str, dashboard: bool) -> Mapping[str, str]:
    """Return the variables with TMPDIR=/tmp, and print why, if Ray's sockets do not fit below a temporary folder.

    A TaskProlog of the site may set a long TMPDIR after the job script, which cannot shorten it then.
    """
    length = socket_bytes(scratch, dashboard)
    if length <= SOCKET_BYTES:
        return environ
    print(
        f"hpc-rl: node {node}: Ray's files are in /tmp, because the paths of its sockets would have {length} bytes "
        f"below TMPDIR ({scratch.parent}), and {SOCKET_BYTES} are possible",
        flush=True,
    )
    return {**environ, "TMPDIR": "/tmp"}


def socket_bytes(scratch: Path, dashboard: bool) -> int:
    """Return the length of Ray's longest socket path below a temporary folder of a job."""
    return len(os.fsencode(_temp_dir(scratch) / (LONGEST_DASHBOARD_SOCKET if dashboard else LONGEST_SOCKET)))


def _temp_dir(scratch: Path) -> Path:
    return scratch / "ray"
