"""The ports of a Ray node, all of them fixed, in small blocks."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.node.network import PortBlocks, free_blocks, given_blocks

BLOCKS, BLOCK_SIZE = 32, 16
"""Number of blocks of one node, and of ports in a block."""
SETTING = "ray.first_port"
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""Ray's names of the ports of a node's agent, which it has only if there is a dashboard."""


@dataclass(frozen=True)
class RayPorts:
    """The ports in the blocks that start at `firsts`, which are reserved and not listened on.

    The first block is for services, the others are for workers.
    """

    firsts: tuple[int, ...]

    @property
    def gcs(self) -> int:
        """Ray's global control store."""
        return self.firsts[0] + 1

    @property
    def dashboard(self) -> int:
        """Ray's dashboard."""
        return self.firsts[0] + 3

    @property
    def roll_call(self) -> int:
        """Connections of the other nodes' entries."""
        return self.firsts[0] + 2

    def services(self, dashboard: bool) -> dict[str, int]:
        """Return the ports of a node's services by Ray's names; 0 for none."""
        names = ["node_manager_port", "object_manager_port", "runtime_env_agent_port"]
        ports = {name: self.firsts[0] + 4 + offset for offset, name in enumerate([*names, *AGENT_PORTS])}
        return ports if dashboard else {**ports, **dict.fromkeys(AGENT_PORTS, 0)}

    @property
    def workers(self) -> list[int]:
        """The ports for drivers, tasks and actors, which use one each."""
        return [port for first in self.firsts[1:] for port in range(first + 1, first + BLOCK_SIZE)]


def reserve(first: int | None, nodes_before: int) -> PortBlocks:
    """Reserve the ports of one node.

    Args:
        first: ray.first_port.
        nodes_before: number of nodes of this job that share the machine and precede this one.

    Raises:
        UserError: the configured ports are occupied, or there are not enough free blocks.
    """
    if first is None:
        return free_blocks(BLOCKS, BLOCK_SIZE)
    return given_blocks(first + nodes_before * BLOCKS * BLOCK_SIZE, BLOCKS, BLOCK_SIZE, SETTING)
