"""Choose trainer.device=auto and the number of processes per node by the hardware of the job's nodes.

Both are chosen when a job is planned, so that the script and config.yaml state them. The sources, in this order: the
options on the command line, the site profile (slurm.node), and what Slurm shows of the partition.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hpc_rl.host.accelerators import find_accelerators
from hpc_rl.slurm import commands
from hpc_rl.slurm.capacity import shapes
from hpc_rl.slurm.cluster import NodeGroup


class Devices:
    """Fill in trainer.device, trainer.n_gpus_per_node and the shape of a node, for one job or all points of a sweep.

    Args:
        local: the job runs on this machine and uses its GPUs.
    """

    def __init__(self, local: bool = False) -> None:
        self._local = local
        self._groups: dict[tuple[str, Any], NodeGroup | None] = {}
        self.note = ""
        """What was chosen, in a sentence for the user; empty if nothing was left open."""

    def fill_in(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return dotted key -> value for the keys that a configuration leaves open.

        Args:
            tree: the configuration as nested tables, without the schema's defaults.
        """
        trainer, slurm = _table(tree, "trainer"), _table(tree, "slurm")
        device = trainer.get("device", "auto")
        if device == "cpu":
            return {}
        kind, gpus, found = self._gpus(slurm)
        if device == "auto" and gpus == 0:
            self.note = "trainer.device=auto: no GPUs found, so the job runs on CPUs"
            return {"trainer.device": "cpu"}
        found["trainer.device"] = kind if device == "auto" else device
        if "n_gpus_per_node" not in trainer and gpus:
            nodes = trainer.get("nnodes", 1)
            shared_by = nodes if self._local and isinstance(nodes, int) and nodes > 0 else 1
            found["trainer.n_gpus_per_node"] = max(1, gpus // shared_by)
        if device == "auto" and gpus is None:
            self.note = (
                "trainer.device=auto: the number of GPUs per node is unknown, so the job requests "
                f"{trainer.get('n_gpus_per_node', 1)} per node (set --gpus-per-node, or trainer.device=cpu for none)"
            )
        return found

    def _gpus(self, slurm: Mapping[str, Any]) -> tuple[str, int | None, dict[str, Any]]:
        """Return torch's name of a node's GPUs, their number (None if unknown), and options that describe the node.

        Slurm does not show whose GPUs they are: for others than NVIDIA's and AMD's, the site profile has the name.
        """
        if self._local:
            return *find_accelerators(os.environ), {}
        node = _table(slurm, "node")
        if isinstance(node.get("gpus"), int):
            return "cuda", node["gpus"], {}
        partition, kind = str(slurm.get("partition") or ""), slurm.get("gpu_type")
        if (partition, kind) not in self._groups:
            self._groups[partition, kind] = _usual_node(partition, kind)
        group = self._groups[partition, kind]
        if group is None or (not group.all_gpus and _names_gpus(slurm)):
            return (
                "cuda",
                None,
                {},
            )  # a partition without the GPUs that were asked for is refused by the preflight check
        shape = {"slurm.node.gpus": group.all_gpus}
        if "cpus" not in node:
            shape["slurm.node.cpus"] = group.cpus
        return "cuda", group.all_gpus, shape if group.all_gpus else {}


def _names_gpus(slurm: Mapping[str, Any]) -> bool:
    """Return whether the options name GPUs explicitly: their type, or an sbatch option."""
    own = _table(slurm, "sbatch")
    return bool(slurm.get("gpu_type")) or any("gpu" in str(word) for word in (*own, own.get("gres")))


def _usual_node(partition: str, gpu_type: Any) -> NodeGroup | None:
    """Return the most frequent kind of node in a partition, of those with GPUs if there are any; None if unknown."""
    if not commands.available():
        return None
    try:
        groups = commands.node_groups()
    except commands.NoAnswer:
        return None
    names = partition.split(",") if partition else [group.partition for group in groups if group.is_default]
    there = shapes([group for group in groups if group.partition in names])
    with_gpus = [group for group in there if group.all_gpus and (gpu_type is None or gpu_type in group.gpus)]
    return next(iter(with_gpus or there), None)


def _table(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, Mapping) else {}
