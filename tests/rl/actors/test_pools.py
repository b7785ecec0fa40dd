"""The arithmetic of pools. What Ray makes of them is in tests/rl/runs/test_pools.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpc_rl.errors import UserError
from hpc_rl.rl.actors import pools
from hpc_rl.rl.actors.pools import ClusterNode, cluster_nodes


def nodes_of(*sizes: tuple[int, int]) -> list[ClusterNode]:
    return [ClusterNode(f"id{i}", f"node{i + 1}", i, gpus, cpus) for i, (gpus, cpus) in enumerate(sizes)]


def check(spec: dict[str, list[int]], *sizes: tuple[int, int], spread: bool = False) -> None:
    pools.check_supply(spec, nodes_of(*sizes), "cuda", spread)


def refusal(spec: dict[str, list[int]], *sizes: tuple[int, int], spread: bool = False) -> str:
    with pytest.raises(UserError) as caught:
        check(spec, *sizes, spread=spread)
    return str(caught.value)


def test_pools_that_fit() -> None:
    check({"train": [8, 8]}, (8, 16), (8, 16))
    check({"a": [4], "b": [4]}, (8, 8))
    check({"small": [2], "large": [8]}, (8, 8), (2, 8))  # the larger entry finds its node first
    check({"wide": [6]}, (4, 8), (4, 8), spread=True)


@pytest.mark.parametrize(
    "spec, sizes, message",
    [
        (
            {"train": [8, 8]},
            [(4, 8), (4, 8)],
            "pool train needs 2 nodes x 8 GPUs; the cluster has 2 x 4 GPUs and 8 CPUs",
        ),
        ({"train": [8]}, [(4, 8), (4, 8)], "pool train needs 1 node x 8 GPUs; the cluster has 2 x 4 GPUs and 8 CPUs"),
        (
            {"train": [8, 4]},
            [(8, 8), (2, 8)],
            "pool train needs 8 + 4 GPUs, each on one node; the cluster has 1 x 8 GPUs and 8 CPUs + 1 x 2 GPUs and 8 "
            "CPUs",
        ),
        (
            {"train": [4], "engines": [4, 4]},
            [(8, 8)],
            "pool train needs 1 node x 4 GPUs; pool engines needs 2 nodes x 4 GPUs; the cluster has 1 x 8 GPUs and 8 "
            "CPUs; engines does not fit",
        ),
        # A GPU of a pool takes a CPU too.
        ({"train": [8]}, [(8, 4)], "pool train needs 1 node x 8 GPUs; the cluster has 1 x 8 GPUs and 4 CPUs"),
        ({"train": [1]}, [], "pool train needs 1 node x 1 GPU; the cluster has no nodes"),
    ],
)
def test_pools_that_do_not_fit(spec: dict[str, list[int]], sizes: list[tuple[int, int]], message: str) -> None:
    assert refusal(spec, *sizes) == message


def test_spread_over_nodes_counts_them_together() -> None:
    assert "needs 1 node x 9 GPUs" in refusal({"wide": [9]}, (4, 8), (4, 8), spread=True)


def test_cpu_slots_are_counted_in_cpus() -> None:
    with pytest.raises(UserError) as caught:
        pools.check_supply({"train": [3, 3]}, nodes_of((0, 2), (0, 2)), "cpu", spread=False)
    assert str(caught.value) == "pool train needs 2 nodes x 3 CPUs; the cluster has 2 x 2 CPUs"


def test_nodes_are_in_the_order_of_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As numbers: 10.0.0.9 before 10.0.0.10. Dead ones are left out."""

    def info(address: str, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {
            "NodeID": f"id-{address}",
            "NodeManagerHostname": f"host-{address}",
            "NodeManagerAddress": address,
            "Alive": alive,
            "Resources": {"CPU": 8.0, **resources},
        }

    given = [info("10.0.0.10", GPU=4.0), info("10.0.0.9"), info("10.0.0.1", alive=False), info("9.255.0.3")]
    monkeypatch.setattr(pools, "ray", SimpleNamespace(nodes=lambda: given))
    found = cluster_nodes()
    assert [node.name for node in found] == ["host-9.255.0.3", "host-10.0.0.9", "host-10.0.0.10"]
    assert [(node.gpus, node.cpus) for node in found] == [(0, 8), (0, 8), (4, 8)]


def test_actors_ask_for_devices_by_rays_names() -> None:
    assert pools.actor_resources("cuda", 0.5) == pools.actor_resources("xpu", 0.5) == {"num_gpus": 0.5, "num_cpus": 0.5}
    assert pools.actor_resources("npu", 0.5) == {"resources": {"NPU": 0.5}, "num_cpus": 0.5}
    assert pools.actor_resources("cpu", 1.0) == {"num_cpus": 1.0}
