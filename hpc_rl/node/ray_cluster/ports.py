"""Which of its ports a Ray node uses for what: all of them pinned, in one block."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_rl.node.ports import PortBlock, free_block, given_block

BLOCK = 512
"""Ports of one node. All jobs take blocks of this size, so that blocks never overlap."""
SETTING = "ray.first_port"


@dataclass(frozen=True)
class RayPorts:
    """The ports in the block that starts at `first`, a port that nobody listens on."""

    first: int

    @property
    def gcs(self) -> int:
        return self.first + 1

    @property
    def roll_call(self) -> int:
        return self.first + 2

    @property
    def dashboard(self) -> int:
        return self.first + 3

    def services(self, dashboard: bool) -> dict[str, int]:
        """Ports of a node's services, by the names that Ray gives them; 0 for none."""
        names = ["node_manager_port", "object_manager_port", "runtime_env_agent_port"]
        for_dashboard = ["metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"]
        ports = {name: self.first + 4 + offset for offset, name in enumerate([*names, *for_dashboard])}
        return ports if dashboard else {**ports, **dict.fromkeys(for_dashboard, 0)}

    @property
    def workers(self) -> tuple[int, int]:
        """First and last port of drivers, tasks and actors: one each."""
        return self.first + 16, self.first + BLOCK - 1

    @classmethod
    def of_gcs(cls, port: int) -> RayPorts:
        return cls(port - 1)


def reserve(key: str, wanted: int | None, place: int) -> PortBlock:
    """Ports for one node.

    Args:
        key: decides where the search starts.
        wanted: ray.first_port.
        place: how many nodes of this job share the machine and come before this one.

    Raises:
        UserError: the wanted ports are occupied, or none are free.
    """
    if wanted is None:
        return free_block(key, BLOCK)
    return given_block(wanted + place * BLOCK, BLOCK, SETTING)
