"""Choose trainer.device=auto and the number of processes per node by the hardware of the job's nodes.

Both are chosen when a job is planned, so that the script and config.yaml state them. The sources, in this order: the
options on the command line, the site profile (slurm.node), and what Slurm shows of the partition.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from hpc_rl.slurm import commands
from hpc_rl.slurm.capacity import shapes
from hpc_rl.slurm.cluster import NodeGroup
from hpc_rl.system.accelerators import find_accelerators


class Devices:
    """Fill in trainer.device, trainer.n_gpus_per_node and the shape of a node, for one job or all points of a sweep.

    Args:
        local: the job runs on this machine and uses its GPUs.
        nodes: the nodes of the cluster, if another part of the command needs them too.
    """

    def __init__(self, local: bool = False, nodes: commands.NodeListing | None = None) -> None:
        self._local = local
        self.nodes = nodes or commands.NodeListing()
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
        # Slurm does not show whose GPUs they are: those that torch does not call cuda are named in the site profile.
        asked = trainer.get("n_gpus_per_node")
        most = asked if isinstance(asked, int) else 0
        kind, gpus, found = (*find_accelerators(os.environ), {}) if self._local else ("cuda", *self._node(slurm, most))
        if device == "auto" and gpus == 0:
            self.note = "trainer.device=auto: no GPUs found, so the job runs on CPUs"
            return {"trainer.device": "cpu"}
        found["trainer.device"] = kind if device == "auto" else device
        if "n_gpus_per_node" not in trainer and gpus:
            nodes = trainer.get("nnodes", 1)
            shared_by = nodes if self._local and isinstance(nodes, int) and nodes > 0 else 1
            found["trainer.n_gpus_per_node"] = max(1, gpus // shared_by)
        notes = []
        if device == "auto" and gpus is None and asked is None:
            notes.append(
                "trainer.device=auto: the number of GPUs per node is unknown, so the job requests 1 per node (set "
                "--gpus-per-node, or trainer.device=cpu for none)"
            )
        if not self._local and "slurm.node.cpus" not in found and _leaves_cpus_open(slurm):
            notes.append(
                "the number of CPUs per node is unknown, so the job requests one per GPU, which is usually too few "
                "to load data (set slurm.cpus_per_gpu, or slurm.node.cpus in the site profile)"
            )
        self.note = "; ".join(notes)
        return found

    def _node(self, slurm: Mapping[str, Any], wanted: int) -> tuple[int | None, dict[str, Any]]:
        """Return the GPUs of a node, None if unknown, and the options that describe the node and are open.

        Args:
            wanted: GPUs of each node that the job requests; 0 if this is open. If the partition has nodes of several
                sizes, and those of the profile are too small, larger ones are described.
        """
        stated = _table(slurm, "node").get("gpus")
        is_too_small = isinstance(stated, int) and 0 < stated < wanted
        if isinstance(stated, int) and not _leaves_cpus_open(slurm) and not is_too_small:
            return stated, {}
        group = _usual_node(self.nodes, slurm, wanted)
        if is_too_small and group is not None and group.all_gpus >= wanted:
            shape = {"gpus": group.all_gpus, "cpus": group.cpus, "mem_mb": group.memory_mb}
            described = {key: size for key, size in shape.items() if _table(slurm, "node").get(key)}
            return group.all_gpus, {f"slurm.node.{key}": size for key, size in described.items()}
        if isinstance(stated, int):
            is_it = group is not None and 0 < stated == group.all_gpus and _leaves_cpus_open(slurm)
            return stated, {"slurm.node.cpus": group.cpus} if group is not None and is_it else {}
        if group is None or (not group.all_gpus and _names_gpus(slurm)):
            return None, {}  # a partition without the GPUs that were asked for is refused by the preflight check
        shape = {"slurm.node.gpus": group.all_gpus}
        if "cpus" not in _table(slurm, "node"):
            shape["slurm.node.cpus"] = group.cpus
        return group.all_gpus, shape if group.all_gpus else {}


def _leaves_cpus_open(slurm: Mapping[str, Any]) -> bool:
    """Return whether no option gives the CPUs of a job on GPUs."""
    given = slurm.get("cpus_per_task") or slurm.get("cpus_per_gpu") or _table(slurm, "node").get("cpus")
    left_out = slurm.get("leave_out")
    is_left_out = isinstance(left_out, list) and "cpus-per-task" in left_out
    return not (given or is_left_out or "cpus-per-gpu" in _table(slurm, "sbatch"))


def _names_gpus(slurm: Mapping[str, Any]) -> bool:
    """Return whether the options name GPUs explicitly: their type, or an sbatch option."""
    own = _table(slurm, "sbatch")
    return bool(slurm.get("gpu_type")) or any(re.search(r"[gnx]pu", str(word)) for word in (*own, own.get("gres")))


def _usual_node(nodes: commands.NodeListing, slurm: Mapping[str, Any], wanted: int) -> NodeGroup | None:
    """Return the most frequent kind of node in a partition, of those with enough GPUs if there are any.

    Returns:
        None if it is unknown.
    """
    if not commands.available():
        return None
    partition, gpu_type = str(slurm.get("partition") or ""), slurm.get("gpu_type")
    try:
        groups = nodes.groups(str(_table(slurm, "sbatch").get("clusters") or ""))
    except commands.NoAnswer:
        return None
    names = partition.split(",") if partition else [group.partition for group in groups if group.is_default]
    there = shapes([group for group in groups if group.partition in names])
    with_gpus = [group for group in there if group.all_gpus and (gpu_type is None or gpu_type in group.gpus)]
    large_enough = [group for group in with_gpus if group.all_gpus >= wanted]
    return next(iter(large_enough or with_gpus or there), None)


def _table(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, Mapping) else {}
