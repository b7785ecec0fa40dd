"""trainer.device=auto and the number of processes per node: what the job's nodes have.

Both are settled when a job is planned, so that the script and config.yaml state them. What counts, in this order: the
options that were given, the site profile (slurm.node), and what Slurm shows of the partition.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_rl.slurm import commands
from hpc_rl.slurm.capacity import shapes
from hpc_rl.slurm.cluster import NodeGroup

SMI_TIMEOUT_S = 20


class Devices:
    """Fills in trainer.device, trainer.n_gpus_per_node and the shape of a node, for one job or all points of a sweep.

    Args:
        local: the job runs on this machine, so that its own GPUs count.
    """

    def __init__(self, local: bool = False) -> None:
        self._local = local
        self._groups: dict[tuple[str, Any], NodeGroup | None] = {}
        self.note = ""
        """What was chosen, for a user who left it open; empty if nothing was."""

    def fill_in(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Dotted key -> value for the keys that a configuration leaves open.

        Args:
            tree: the configuration as nested tables, without the schema's defaults.
        """
        trainer, slurm = _table(tree, "trainer"), _table(tree, "slurm")
        device = trainer.get("device", "auto")
        if device not in ("auto", "cuda"):
            return {}
        gpus, found = self._gpus(slurm)
        if device == "auto" and gpus == 0:
            self.note = "trainer.device=auto: no GPUs there, so the job computes on CPUs"
            return {"trainer.device": "cpu"}
        found["trainer.device"] = "cuda"
        if "n_gpus_per_node" not in trainer and gpus:
            nodes = trainer.get("nnodes", 1)
            shared_by = nodes if self._local and isinstance(nodes, int) and nodes > 0 else 1
            found["trainer.n_gpus_per_node"] = max(1, gpus // shared_by)
        if device == "auto" and gpus is None:
            self.note = (
                "trainer.device=auto: how many GPUs a node has is not known here, so the job asks for "
                f"{trainer.get('n_gpus_per_node', 1)} per node (--gpus-per-node; trainer.device=cpu for none)"
            )
        return found

    def _gpus(self, slurm: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
        """GPUs of a node, None if nothing here can tell; and what else becomes known of the node."""
        if self._local:
            return local_gpus(os.environ), {}
        node = _table(slurm, "node")
        if isinstance(node.get("gpus"), int):
            return node["gpus"], {}
        partition, kind = str(slurm.get("partition") or ""), slurm.get("gpu_type")
        if (partition, kind) not in self._groups:
            self._groups[partition, kind] = _usual_node(partition, kind)
        group = self._groups[partition, kind]
        if group is None or (not group.all_gpus and _names_gpus(slurm)):
            return None, {}  # a partition without the GPUs that were asked for is refused by the preflight check
        shape = {"slurm.node.gpus": group.all_gpus}
        if "cpus" not in node:
            shape["slurm.node.cpus"] = group.cpus
        return group.all_gpus, shape if group.all_gpus else {}


def local_gpus(environ: Mapping[str, str]) -> int:
    """GPUs of this machine that the processes of this shell may use."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    smi = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if smi is None:
        return 0 if not Path("/dev/kfd").exists() else len(list(Path("/dev/dri").glob("renderD*")))
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _names_gpus(slurm: Mapping[str, Any]) -> bool:
    """Whether the options ask for GPUs in so many words: by their type, or by an sbatch option."""
    own = _table(slurm, "sbatch")
    return bool(slurm.get("gpu_type")) or any("gpu" in str(word) for word in (*own, own.get("gres")))


def _usual_node(partition: str, gpu_type: Any) -> NodeGroup | None:
    """The nodes of a partition of which there are most, if Slurm shows it: those with GPUs if there are any."""
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
