from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import ray

from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.actors.pools import create_pools, release_pools
from tests.rl.runs.jobs import TIMEOUT_S

OWNER = "a test of pools"


@pytest.fixture(autouse=True)
def given_back(cluster: None) -> Iterator[None]:
    yield
    release_pools(OWNER)


def test_slots_are_in_rank_order_and_hold_actors() -> None:
    pools = create_pools({"train": [2], "engines": [1]}, "cpu", TIMEOUT_S, OWNER)
    ranks = {name: [slot.rank for slot in pool.slots] for name, pool in pools.items()}
    assert ranks == {"train": [0, 1], "engines": [0]}
    assert [slot.bundle for slot in pools["train"].slots] == [0, 1]
    assert [[slot.rank for slot in node] for node in pools["train"].nodes] == [[0, 1]]
    # Two halves of a slot: a worker and an engine.
    where = ray.remote(lambda: ray.util.get_current_placement_group().id.hex())
    slot = pools["train"].slots[1]
    found = ray.get([where.options(**slot.options("cpu", 0.5)).remote() for _ in range(2)], timeout=TIMEOUT_S)
    assert found == [slot.group.id.hex()] * 2


def test_a_pool_larger_than_the_cluster_is_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"^pool train needs 2 nodes x 3 CPUs; the cluster has 1 x 4 CPUs$"):
        create_pools({"train": [3, 3]}, "cpu", TIMEOUT_S, OWNER)


def test_what_others_hold_is_waited_for_and_then_told() -> None:
    create_pools({"theirs": [3]}, "cpu", TIMEOUT_S, OWNER)
    release_pools("somebody else")
    message = (
        "pool ours: Ray did not reserve 1 node x 2 CPUs within 1 s (ray.start_timeout_s). The cluster has 1 x 4 CPUs"
    )
    with pytest.raises(RunError, match=re.escape(message)):
        create_pools({"ours": [2]}, "cpu", 1, OWNER)
