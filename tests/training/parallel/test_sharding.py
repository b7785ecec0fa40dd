"""The choice of sharding: pure functions of numbers."""

from __future__ import annotations

import pytest
import torch

from hpc_rl.errors import UserError
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sharding import choose

GB = 10**9


def world(ranks: int, ranks_per_node: int | None) -> World:
    return World(0, ranks, torch.device("cpu"), ranks_per_node)


@pytest.mark.parametrize(
    ("requested", "state_bytes", "per_node", "memory", "chosen"),
    [
        ("auto", 160 * GB, 8, 80 * GB, "hybrid"),  # 160e9 / 8 = 20e9, a quarter of the memory
        ("auto", 160 * GB + 8, 8, 80 * GB, "full"),
        ("auto", 1, 16, 80 * GB, "full"),  # one node
        ("auto", 1, None, 80 * GB, "full"),
        ("auto", 1, 8, None, "full"),  # CPUs
        ("hybrid", 10**15, 8, 80 * GB, "hybrid"),
        ("hybrid", 1, 16, None, "full"),
        ("full", 1, 8, 80 * GB, "full"),
        ("gradients", 1, 8, 80 * GB, "gradients"),
        ("none", 1, None, None, "none"),
    ],
)
def test_the_choice(requested: str, state_bytes: int, per_node: int | None, memory: int | None, chosen: str) -> None:
    assert choose(requested, state_bytes, world(16, per_node), memory) == chosen


@pytest.mark.parametrize(
    ("requested", "state_bytes", "memory", "chosen"),
    [
        ("auto", 20 * GB, 80 * GB, "none"),  # a quarter of the memory
        ("auto", 20 * GB + 1, 80 * GB, "full"),
        ("auto", 1, None, "full"),
        ("gradients", 10**15, 80 * GB, "none"),
        ("full", 1, 80 * GB, "full"),
        ("hybrid", 1, 80 * GB, "full"),
    ],
)
def test_the_choice_of_one_rank(requested: str, state_bytes: int, memory: int | None, chosen: str) -> None:
    assert choose(requested, state_bytes, world(1, 1), memory) == chosen


def test_hybrid_needs_nodes_of_equal_size() -> None:
    with pytest.raises(UserError, match=r"^trainer\.sharding=hybrid needs the same number of ranks on each node"):
        choose("hybrid", 1, world(12, None), None)
