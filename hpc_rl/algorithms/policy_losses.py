"""The table of policy losses.

To add one, write a function `PolicyBatch -> PolicyLoss` in a new file (losses.py defines both types), add a row
to POLICY_LOSSES, and add the name to AlgorithmConfig.loss.
"""

from __future__ import annotations

from collections.abc import Callable

from hpc_rl.algorithms.losses import PolicyBatch, PolicyLoss, cispo, gspo, ppo

POLICY_LOSSES: dict[str, Callable[[PolicyBatch], PolicyLoss]] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}
"""algorithm.loss -> loss."""
