"""Where on its node a job's Ray is, and what it may use there."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.host.ray_version import check_ray, installed_ray
from hpc_rl.host.scratch import held_scratch, scratch_dir
from hpc_rl.node.network import choose_address
from hpc_rl.node.ray_cluster.environment import shared_environment
from hpc_rl.node.ray_cluster.limits import Grant, granted
from hpc_rl.node.ray_cluster.ports import RayPorts, reserve
from hpc_rl.node.ray_cluster.start import Orders
from hpc_rl.slurm.allocation import Allocation

SOCKET_BYTES = 107
"""Longest path of a UNIX socket (unix(7))."""
SESSION_BYTES = 64
"""Ray's part of it: `/session_2026-01-02_03-04-05_678901_1234567/sockets/plasma_store` and a number."""
_TOKEN = ".ray-token"


@dataclass(frozen=True)
class Site:
    allocation: Allocation
    interface: str
    address: str
    ports: RayPorts
    grant: Grant
    scratch: Path
    """For everything that the job writes on this node's own disk; nobody else can enter it."""
    token: Path
    """The file, in the attempt's folder, which nobody else can enter."""

    @property
    def temp_dir(self) -> Path:
        """Ray's own: it lets everybody into it, so it lies inside a folder that does not."""
        return _temp_dir(self.scratch)

    def orders(self, gcs_address: str, dashboard: bool) -> Orders:
        """What the Ray processes of this node need to know."""
        return Orders(
            head=self.allocation.is_head,
            gcs_address=gcs_address,
            address=self.address,
            name=f"{self.allocation.node}.{self.allocation.node_rank}",
            temp_dir=str(self.temp_dir),
            num_cpus=self.grant.cpus,
            num_gpus=self.grant.gpus,
            memory=self.grant.memory,
            object_store_memory=self.grant.object_store,
            services=self.ports.services(dashboard),
            worker_ports=self.ports.workers,
            dashboard=dashboard,
            dashboard_port=self.ports.dashboard,
        )

    def environment(self, processes: int, timeline: bool) -> dict[str, str]:
        """What Ray's processes and the driver have in common."""
        return shared_environment(
            os.environ,
            interface=self.interface,
            threads=self.allocation.cpus // processes,
            token=self.token,
            scratch=self.scratch,
            temp_dir=self.temp_dir,
            timeline=timeline,
        )


@contextmanager
def prepared_site(allocation: Allocation, attempt_dir: Path, options: argparse.Namespace) -> Iterator[Site]:
    """Ports and a temporary folder of this job's own, until the end.

    Raises:
        UserError: something that Ray needs is missing or taken.
    """
    check_ray(installed_ray(), sys.executable)
    rank, neighbours = allocation.node_rank, allocation.nodes.count(allocation.node)
    interface, address = node_address(allocation, options.interface)
    place = rank if neighbours > 1 else None
    scratch = scratch_dir(os.environ, allocation.job_id, allocation.restart, place)
    check_length(scratch)
    grant = granted(
        allocation,
        os.environ,
        most_cpus=options.num_cpus,
        gpus=options.processes if options.device == "cuda" else 0,
        object_store=options.object_store_bytes,
    )
    before = allocation.nodes[:rank].count(allocation.node)
    with reserve(f"{allocation.job_id}.{rank}", options.first_port, before) as block, held_scratch(scratch):
        yield Site(allocation, interface, address, RayPorts(block.first), grant, scratch, attempt_dir / _TOKEN)


def node_address(allocation: Allocation, wanted: str | None) -> tuple[str, str]:
    """(interface, address) of this node.

    A job on one machine has the loopback, with an address for each node, and none of them 127.0.0.1: Ray's drivers
    would take another of the machine's addresses instead.
    """
    others = [name for name in allocation.nodes if name != allocation.node]
    interface, address = choose_address(wanted, others[0] if others else None)
    if address == "127.0.0.1":
        address = f"127.0.{allocation.node_rank // 250}.{allocation.node_rank % 250 + 2}"
    return interface, address


def check_length(scratch: Path) -> None:
    """Raises UserError where the paths of Ray's sockets below it would be too long."""
    length = len(os.fsencode(_temp_dir(scratch)))
    too_long = length + SESSION_BYTES - SOCKET_BYTES
    if too_long > 0:
        raise UserError(
            f"temporary folder {_temp_dir(scratch)} has {length} bytes: with {SESSION_BYTES} for Ray's sockets in it "
            f"that is over the {SOCKET_BYTES} of a UNIX socket's path; set TMPDIR to a path of at most "
            f"{len(os.fsencode(scratch.parent)) - too_long} bytes (slurm.env.TMPDIR=/tmp)"
        )


def _temp_dir(scratch: Path) -> Path:
    return scratch / "ray"
