"""The carriers of a step's experience, by name.

To add one, write a module with a class (see `hpc_rl.rl.carriers.base.Carrier`), and add a row to `CARRIERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from hpc_rl.config.ppo import PpoConfig
from hpc_rl.rl.carriers.base import Carrier
from hpc_rl.rl.carriers.through_ray import RayCarrier


def _ray(_nodes: Sequence[str]) -> Carrier:
    return RayCarrier()


def _transfer_queue(nodes: Sequence[str]) -> Carrier:
    found: Carrier = importlib.import_module("hpc_rl.rl.carriers.through_transfer_queue").TransferQueueCarrier(nodes)
    return found


CARRIERS: dict[str, Callable[[Sequence[str]], Carrier]] = {"ray": _ray, "transfer_queue": _transfer_queue}
"""Name -> opens the carrier, given Ray's ids of the nodes that train."""


def open_carrier(config: PpoConfig, nodes: Sequence[str]) -> Carrier:
    """Open the configured carrier.

    Raises:
        UserError: its package is missing, or has another version.
        RunError: its processes did not start.
    """
    return CARRIERS["transfer_queue" if config.transfer_queue.enable else "ray"](nodes)


def needed_by_driver(config: PpoConfig) -> frozenset[str]:
    """Return the columns from the ranks with which the driver computes. The others may stay with the carrier.

    The loop needs them for advantages (see `hpc_rl.rl.experience`), for the correction, and for metrics.
    """
    algorithm = config.algorithm
    needed = {"teacher_logprobs", "values"}
    if algorithm.kl.where == "reward":
        needed |= {"old_logprobs", "ref_logprobs"}
    if config.teacher.path is not None or algorithm.corrects or config.rollout.calculate_log_probs:
        needed.add("old_logprobs")
    return frozenset(needed)
