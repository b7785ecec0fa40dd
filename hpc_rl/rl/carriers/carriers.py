"""Which carrier a run has, and which columns may stay with it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rl.carriers.base import Carrier
from hpc_rl.rl.carriers.through_ray import RayCarrier


def open_carrier(config: PpoConfig, nodes: Sequence[str]) -> Carrier:
    """Open the carrier of a run: Ray's calls, or with transfer_queue.enable TransferQueue.

    Args:
        nodes: Ray's ids of the nodes that train.

    Raises:
        UserError: its package is missing, or has another version.
        RunError: its processes did not start.
    """
    if not config.transfer_queue.enable:
        return RayCarrier()
    # The package is optional.
    found: Carrier = importlib.import_module("hpc_rl.rl.carriers.through_transfer_queue").TransferQueueCarrier(nodes)
    return found


def needed_by_driver(config: PpoConfig) -> frozenset[str]:
    """Return the columns from the ranks with which the driver computes. The others may stay with the carrier.

    The loop needs them for advantages (see `hpc_rl.rl.loop.experience`), for the correction, and for metrics.
    """
    algorithm = config.algorithm
    needed = {"teacher_logprobs", "values"}
    if algorithm.kl.where == "reward":
        needed |= {"old_logprobs", "ref_logprobs"}
    if config.teacher.path is not None or algorithm.corrects or config.rollout.calculate_log_probs:
        needed.add("old_logprobs")
    return frozenset(needed)
