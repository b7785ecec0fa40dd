"""The check of the collectives' speed, within nodes and between them."""

from __future__ import annotations

import torch.distributed as dist

from hpc_rl.probes.acceptance.bench import Bench
from hpc_rl.probes.all_reduce import measure
from hpc_rl.training.parallel.distributed import World

WITHIN, BETWEEN = "within a node", "between nodes"


def bandwidth(bench: Bench, world: World, where: str) -> str:
    """Measure all-reduces of the processes of each node, or of one process per node, all groups at the same time."""
    groups = rank_groups(bench.layout.nodes, bench.layout.processes, where)
    # Every rank takes part in making every group.
    made = [dist.new_group(ranks) for ranks in groups]
    own = next(index for index, ranks in enumerate(groups) if world.rank in ranks)
    found = measure(world.device, made[own], groups[own])
    rows = world.gather_rows([found.bandwidth_gb_s, found.latency_s])
    for group in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    slowest = float(rows[:, 0].min())
    return (
        f"{found.backend}, {len(groups[own])} ranks in each group: {slowest:.2f} GB/s in the slowest group, "
        f"{1e6 * float(rows[:, 1].max()):.0f} us latency"
    )


def rank_groups(nodes: int, processes: int, where: str) -> list[list[int]]:
    """Return the ranks that add up numbers together: those of each node, or those with the same place on their node."""
    by_node = [[node * processes + place for place in range(processes)] for node in range(nodes)]
    return by_node if where == WITHIN else [list(ranks) for ranks in zip(*by_node, strict=True)]
