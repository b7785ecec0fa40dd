"""From a step's rewards to advantages, by the estimator's name in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpc_rl.algorithms.advantages import (
    dr_grpo,
    gae,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    to_tokens,
    whiten,
)


@dataclass(frozen=True)
class Outcome:
    """What the responses of a step earned."""

    rewards_BT: torch.Tensor
    """Reward of each token, the penalty for leaving the reference included where there is one; 0 at padding."""
    mask_BT: torch.Tensor
    groups_B: torch.Tensor
    gamma: float = 1.0
    """Discount per token; of gae and reinforce_pp."""
    lam: float = 1.0
    """gae's lambda."""
    values_BT: torch.Tensor | None = None
    """The critic's values; gae needs them."""
    greedy_scores_B: torch.Tensor | None = None
    """Scores of the greedy responses to the same prompts; remax needs them."""

    @property
    def scores_B(self) -> torch.Tensor:
        return self.rewards_BT.sum(dim=1)


@dataclass(frozen=True)
class Estimate:
    advantages_BT: torch.Tensor
    returns_BT: torch.Tensor | None = None
    """What the critic learns; None where there is no critic."""


def _gae(outcome: Outcome) -> Estimate:
    """GAE, whitened over the batch as is usual with PPO."""
    if outcome.values_BT is None:
        raise ValueError("gae needs the critic's values")
    advantages_BT, returns_BT = gae(outcome.rewards_BT, outcome.values_BT, outcome.mask_BT, outcome.gamma, outcome.lam)
    return Estimate(whiten(advantages_BT, outcome.mask_BT), returns_BT)


def _remax(outcome: Outcome) -> Estimate:
    if outcome.greedy_scores_B is None:
        raise ValueError("remax needs the scores of greedy responses")
    return Estimate(to_tokens(remax(outcome.scores_B, outcome.greedy_scores_B), outcome.mask_BT))


ESTIMATORS: dict[str, Callable[[Outcome], Estimate]] = {
    "gae": _gae,
    "grpo": lambda o: Estimate(to_tokens(grpo(o.scores_B, o.groups_B), o.mask_BT)),
    "dr_grpo": lambda o: Estimate(to_tokens(dr_grpo(o.scores_B, o.groups_B), o.mask_BT)),
    "rloo": lambda o: Estimate(to_tokens(rloo(o.scores_B, o.groups_B), o.mask_BT)),
    "reinforce_pp": lambda o: Estimate(reinforce_pp(o.rewards_BT, o.mask_BT, o.gamma)),
    "reinforce_pp_baseline": lambda o: Estimate(reinforce_pp_baseline(o.scores_B, o.groups_B, o.mask_BT)),
    "remax": _remax,
}
"""Names of AlgorithmConfig.advantage. A missing field of the outcome raises ValueError."""
