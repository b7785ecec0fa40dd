"""Clusters of different sites, which differ in what a job has to request. Parameters of `Cluster`.

Jobs run on the nodes with 2 CPUs. Larger nodes exist only to be listed.
"""

from typing import Any

from tests.sandbox.spec import Gpus, Shape

TYPED_GRES: dict[str, Any] = {
    "shapes": (
        Shape(2, cpus=2, sockets=2, memory_mb=8000, gpus=(Gpus(2, "a100", "0,1"),), features="ib,gen4"),
        Shape(1, cpus=16, sockets=2, memory_mb=128000, gpus=(Gpus(8, "a100", "0-7,8-15"),), features="ib,gen4"),
        Shape(1, cpus=16, sockets=2, memory_mb=64000, gpus=(Gpus(1, "a100"), Gpus(7, "a100_1g.5gb")), features="mig"),
        Shape(1, cpus=8, sockets=1, memory_mb=32000, gpus=(Gpus(4, "v100", "0-7"),), features="gen3"),
        Shape(1, cpus=32, sockets=2, memory_mb=64000),
    ),
    "partitions": {
        "gpu": "Nodes=node[1-2] Default=YES MaxTime=2-00:00:00 DefaultTime=01:00:00",
        "mixed": "Nodes=node[1-5] MaxTime=1-00:00:00",
        "cpu": "Nodes=node6 MaxTime=7-00:00:00",
        "devel": "Nodes=node[1-2] MaxTime=00:30:00 MaxNodes=1 PriorityTier=10",
        "theirs": "Nodes=node3 MaxTime=1-00:00:00 AllowAccounts=other",
        "old": "Nodes=node5 State=INACTIVE",
    },
    "accounting": True,
    "accounts": {"root": ("mlgroup", "teaching"), "nobody": ("mlgroup",), "daemon": ("other",)},
}
"""Typed GPUs, requested by --gres=gpu:TYPE:N, some split by MIG; nodes of several shapes; accounts in slurmdbd."""

WHOLE_NODES: dict[str, Any] = {
    "shapes": (
        Shape(2, cpus=2, memory_mb=0, gpus=(Gpus(2),)),
        Shape(1, cpus=2, memory_mb=0),
    ),
    "partitions": {
        "batch": "Nodes=node3 Default=YES MaxTime=1-00:00:00",
        "gpu": "Nodes=node[1-2] MaxTime=12:00:00 OverSubscribe=EXCLUSIVE",
    },
    "memory_allocated": False,
}
"""GPUs without types on whole nodes. Slurm has no information on their memory and rejects --mem. No accounting. The
default partition has no GPUs."""

SHARED_NODES: dict[str, Any] = {
    "shapes": (Shape(2, cpus=2, memory_mb=8000, gpus=(Gpus(2, "rtx6000"),)),),
    "partitions": {
        "shared": "Default=YES MaxTime=1-00:00:00 DefaultTime=00:30:00 MaxMemPerCPU=4000 MaxCPUsPerNode=2",
        "preempt": "MaxTime=7-00:00:00 GraceTime=60",
    },
    "second_network": "ib0",
}
"""Jobs share nodes and are confined to their cores and memory. There is a second network besides eth0."""

VARIANTS = {"typed-gres": TYPED_GRES, "whole-nodes": WHOLE_NODES, "shared-nodes": SHARED_NODES}

LARGE: dict[str, Any] = {
    "shapes": (
        Shape(1, cpus=2, memory_mb=6000),
        Shape(800, cpus=64, sockets=2, memory_mb=512000, gpus=(Gpus(8, "a100"),), prefix="gpu", runs=False),
        Shape(200, cpus=128, sockets=2, memory_mb=256000, features="milan", prefix="cpu", runs=False),
    ),
    "partitions": {
        "gpu": "Nodes=gpu[2-801] Default=YES MaxTime=2-00:00:00",
        "cpu": "Nodes=cpu[802-1001] MaxTime=4-00:00:00",
        "all": "MaxTime=04:00:00",
    },
    "slurmd_timeout_s": 0,  # nodes without slurmd are not marked as down
}
"""A thousand nodes that the controller lists, and one that runs, because a controller needs one."""
