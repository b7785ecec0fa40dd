"""The ports of a Ray node, all of them fixed, in one block."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.node.network import PortBlock, free_block, given_block

BLOCK = 512
"""Number of ports of one node. All jobs use blocks of this size, so that blocks never overlap."""
SETTING = "ray.first_port"


@dataclass(frozen=True)
class RayPorts:
    """The ports in the block that starts at `first`, which is reserved and not listened on."""

    first: int

    @property
    def gcs(self) -> int:
        """Ray's global control store."""
        return self.first + 1

    @property
    def roll_call(self) -> int:
        """Connections of the other nodes' entries."""
        return self.first + 2

    @property
    def dashboard(self) -> int:
        """Ray's dashboard."""
        return self.first + 3

    def services(self, dashboard: bool) -> dict[str, int]:
        """Return the ports of a node's services by Ray's names; 0 for none."""
        names = ["node_manager_port", "object_manager_port", "runtime_env_agent_port"]
        for_dashboard = ["metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"]
        ports = {name: self.first + 4 + offset for offset, name in enumerate([*names, *for_dashboard])}
        return ports if dashboard else {**ports, **dict.fromkeys(for_dashboard, 0)}

    @property
    def workers(self) -> tuple[int, int]:
        """First and last port for drivers, tasks and actors, which use one each."""
        return self.first + 16, self.first + BLOCK - 1

    @classmethod
    def of_gcs(cls, port: int) -> RayPorts:
        """Return the ports of the node whose control store listens on `port`."""
        return cls(port - 1)


def reserve(key: str, first: int | None, nodes_before: int) -> PortBlock:
    """Reserve the ports of one node.

    Args:
        key: determines where the search starts.
        first: ray.first_port.
        nodes_before: number of nodes of this job that share the machine and precede this one.

    Raises:
        UserError: the configured ports are occupied, or no block is free.
    """
    if first is None:
        return free_block(key, BLOCK)
    return given_block(first + nodes_before * BLOCK, BLOCK, SETTING)
