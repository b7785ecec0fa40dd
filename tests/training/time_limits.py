"""Ranks of gloo that print the time limits of what they wait for.

python time_limits.py groups       # of their groups and of the store
python time_limits.py rank0        # rank 1 waits for a key of rank 0 that never comes, as NCCL does to connect
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hpc_rl.training.parallel import distributed, sharding


def limits_of_groups() -> dict[str, list[float]]:
    """Return the limit of each group in seconds, once for each of its backends."""
    distributed._COLLECTIVE_TIMEOUT = timedelta(seconds=1234)  # gloo's own default is equal to ours
    world = distributed.start("cpu", start_timeout_s=600)
    half = world.part([rank for rank in range(4) if rank // 2 == world.rank // 2], 2)
    patient = world.part(range(4), 4, backend="gloo", timeout=timedelta(days=7))
    own = {"all": dist.group.WORLD, "a half": half.group, "all, longer": patient.group}
    for sharded in ("none", "hybrid", "full"):
        for name, ranks in (("the job", replace(world, ranks_per_node=2)), ("a half", half)):
            mesh = sharding._mesh(sharded, ranks, ranks.group)
            own |= {f"{sharded} of {name}, {axis}": mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}
    found = {name: limits(group) for name, group in own.items()}
    return {**found, "the store": [_get_default_store().timeout.total_seconds()]}


def limits(group: Any) -> list[float]:
    """Return a group's limit."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [backend.options._timeout.total_seconds() for backend in backends]


def wait_for_rank0() -> dict[str, Any]:
    """Let rank 1 read a key of a new communicator that rank 0 does not write, and return the error and the seconds."""
    distributed._COLLECTIVE_TIMEOUT = timedelta(seconds=1)
    world = distributed.start("cpu", start_timeout_s=600)
    store = dist.PrefixStore("cuda:0", _get_default_store())
    if world.is_main:
        store.wait(["rank 1 has read"], timedelta(seconds=600))
        return {}
    began = time.monotonic()
    try:
        store.get("0")
    except RuntimeError as error:
        store.set("rank 1 has read", "")
        return {"seconds": time.monotonic() - began, "error": str(error)}
    return {}


if __name__ == "__main__":
    print(json.dumps({"groups": limits_of_groups, "rank0": wait_for_rank0}[sys.argv[1]]()), flush=True)
    distributed.finish()
