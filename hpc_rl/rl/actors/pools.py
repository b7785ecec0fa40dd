"""Named pools of GPUs (or, with trainer.device=cpu, of single CPUs) as Ray placement groups.

    pools = create_pools({"global_pool": [8, 8]}, "cuda", timeout_s=300, owner="my run")
    pools["global_pool"].slots[3]      # rank 3: the fourth GPU of the first node

Each entry of a pool is the part on one node. https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hpc_rl.errors import RunError, UserError
from hpc_rl.formats.counted import counted
from hpc_rl.formats.offer import LENT_ENVIRONMENTS, is_lent
from hpc_rl.software.ray_token import TOKEN
from hpc_rl.system.accelerators import ACCELERATORS, ray_resource


@dataclass(frozen=True)
class ClusterNode:
    """The resources of one node of the cluster."""

    id: str
    name: str
    address: int
    """IP address as a number, by which nodes are sorted the same way in every run of a job."""
    gpus: int
    cpus: int


@dataclass(frozen=True)
class Slot:
    """One GPU of a pool, or one CPU with trainer.device=cpu."""

    rank: int
    node: ClusterNode
    group: PlacementGroup
    bundle: int

    def options(self, device: str, share: float) -> dict[str, Any]:
        """Return Ray options for an actor that takes `share` of the slot."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return {**actor_resources(device, share), "scheduling_strategy": strategy}


@dataclass(frozen=True)
class Pool:
    """GPUs that are reserved under one name."""

    name: str
    slots: list[Slot]
    """In rank order: node by node, in the order of their addresses."""

    @property
    def nodes(self) -> list[list[Slot]]:
        """The slots, grouped by node."""
        by_node: dict[str, list[Slot]] = {}
        for slot in self.slots:
            by_node.setdefault(slot.node.id, []).append(slot)
        return list(by_node.values())


def actor_resources(device: str, share: float) -> dict[str, Any]:
    """Return Ray options for a share of a device, and of the CPU that belongs to it."""
    return {**device_resources(device, share), "num_cpus": share}


def device_resources(device: str, share: float) -> dict[str, Any]:
    """Return Ray options for a share of a device; none on CPUs."""
    name = ray_resource(device)
    found: dict[str, Any] = {"GPU": {"num_gpus": share}, "CPU": {}}.get(name, {"resources": {name: share}})
    return found


def create_pools(
    spec: Mapping[str, Sequence[int]], device: str, timeout_s: float, owner: str, strategy: str = "STRICT_PACK"
) -> dict[str, Pool]:
    """Reserve all pools until this process's connection to Ray ends or `release_pools` is called.

    Args:
        spec: name -> number of GPUs on each of the pool's nodes.
        owner: a name that is unique on this cluster, by which `release_pools` finds the pools.
        strategy: Ray's placement strategy for the bundles of one entry, STRICT_PACK or PACK.

    Raises:
        UserError: the cluster is too small; the message compares the request with the resources.
        RunError: Ray did not reserve the pools in time.
    """
    nodes = cluster_nodes()
    check_supply(spec, nodes, device, spread=strategy == "PACK")
    bundle = {ray_resource(device): 1, "CPU": 1}
    groups = {
        name: [
            placement_group([bundle] * n, strategy=strategy, name=f"{owner}:{name}:{number}")
            for number, n in enumerate(sizes)
        ]
        for name, sizes in spec.items()
    }
    deadline = time.monotonic() + timeout_s
    for name, members in groups.items():
        for group in members:
            if not group.wait(max(0.0, deadline - time.monotonic())):
                raise RunError(
                    f"pool {name}: Ray did not reserve {_entries(spec[name], device)} within {timeout_s:.0f} s "
                    f"(ray.start_timeout_s). The cluster has {_inventory(nodes, device)}; other programs on it may use "
                    "some of them: wait for them, or raise ray.start_timeout_s"
                )
    by_id = {node.id: node for node in nodes}
    return {name: Pool(name, _slots(members, by_id)) for name, members in groups.items()}


def release_pools(owner: str) -> None:
    """Release what `create_pools` reserved for this owner, and end the actors in it."""
    for entry in placement_group_table().values():
        if entry["name"].startswith(f"{owner}:") and entry["state"] != "REMOVED":
            remove_placement_group(get_placement_group(entry["name"]))


def cluster_nodes() -> list[ClusterNode]:
    """Return the live nodes of the connected cluster, without lent ones, in the order of their addresses."""
    nodes = [node_of(info) for info in ray.nodes() if info["Alive"] and not is_lent(info["Resources"])]
    return sorted(nodes, key=lambda node: node.address)


def takes_lent_nodes(logs: Path) -> bool:
    """Return whether nodes of other jobs can join the cluster: it is that of a job, and other machines reach it.

    Args:
        logs: the attempt's folder.
    """
    address = ray.get_runtime_context().gcs_address
    return (logs / TOKEN).exists() and not ipaddress.ip_address(address.rpartition(":")[0]).is_loopback


def lent_for_environments() -> dict[ClusterNode, str]:
    """Return the live nodes that other jobs lend for environments, each with the id of its job."""
    nodes = [info for info in ray.nodes() if info["Alive"] and LENT_ENVIRONMENTS in info["Resources"]]
    names = [info["NodeName"].split(".", 3) for info in nodes]
    return {replace(node_of(info), name=name): job for info, (_, job, _, name) in zip(nodes, names, strict=True)}


def check_supply(spec: Mapping[str, Sequence[int]], nodes: Sequence[ClusterNode], device: str, spread: bool) -> None:
    """Check that the cluster can hold all entries of all pools at once.

    Entries are placed largest first, each on the node with the most free slots.

    Args:
        spread: whether an entry may be spread over several nodes.

    Raises:
        UserError: the pools do not fit; the message compares the request with the resources.
    """
    left = {node.id: node.cpus if device == "cpu" else min(node.gpus, node.cpus) for node in nodes}
    entries = sorted(((n, name) for name, sizes in spec.items() for n in sizes), reverse=True)
    if spread:
        entries = [(1, name) for n, name in entries for _ in range(n)]
    for n, name in entries:
        roomiest = max(left, key=lambda node: left[node], default=None)
        if roomiest is None or left[roomiest] < n:
            requested = "; ".join(f"pool {pool} needs {_entries(sizes, device)}" for pool, sizes in spec.items())
            missing = "" if len(spec) == 1 else f"; {name} does not fit"
            raise UserError(f"{requested}; the cluster has {_inventory(nodes, device)}{missing}")
        left[roomiest] -= n


def node_of(info: Mapping[str, Any]) -> ClusterNode:
    """Return a node as `ray.nodes()` describes it."""
    resources = info["Resources"]
    return ClusterNode(
        id=info["NodeID"],
        name=info["NodeManagerHostname"],
        address=int(ipaddress.ip_address(info["NodeManagerAddress"])),
        gpus=sum(int(resources.get(name, 0)) for name in {row.resource for row in ACCELERATORS}),
        cpus=int(resources.get("CPU", 0)),
    )


def _slots(groups: Sequence[PlacementGroup], nodes: Mapping[str, ClusterNode]) -> list[Slot]:
    found = []
    for number, group in enumerate(groups):
        places = placement_group_table(group)["bundles_to_node_id"]
        found += [(nodes[node_id].address, number, bundle, node_id, group) for bundle, node_id in places.items()]
    found.sort(key=lambda place: place[:3])
    return [Slot(rank, nodes[node_id], group, bundle) for rank, (_, _, bundle, node_id, group) in enumerate(found)]


def _entries(sizes: Sequence[int], device: str) -> str:
    """Return `2 nodes x 8 GPUs`, or `8 + 4 GPUs, each on one node` if the entries differ."""
    unit = "CPU" if device == "cpu" else "GPU"
    if len(set(sizes)) == 1:
        return f"{counted(len(sizes), 'node')} x {counted(sizes[0], unit)}"
    return f"{' + '.join(map(str, sizes))} {unit}s, each on one node"


def _inventory(nodes: Sequence[ClusterNode], device: str) -> str:
    """Return the resources of all nodes. CPUs are included because each GPU of a pool needs one."""
    texts = [counted(node.cpus, "CPU") for node in nodes]
    if device != "cpu":
        texts = [f"{counted(node.gpus, 'GPU')} and {text}" for node, text in zip(nodes, texts, strict=True)]
    return " + ".join(f"{texts.count(text)} x {text}" for text in dict.fromkeys(texts)) or "no nodes"
