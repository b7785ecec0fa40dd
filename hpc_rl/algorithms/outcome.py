"""The input and output of advantage estimators."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Outcome:
    """The rewards of a step's responses, and what estimators need besides."""

    rewards_BT: torch.Tensor
    """Reward of each token, including the KL penalty if it is part of the reward; 0 at padding."""
    mask_BT: torch.Tensor
    groups_B: torch.Tensor
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """Lambda of GAE."""
    scale: str = "group"
    """By which deviation GRPO divides: group, batch or none."""
    values_BT: torch.Tensor | None = None
    """The critic's values, if there is a critic."""
    teacher_BT: torch.Tensor | None = None
    """What `advantages.opd` returns, if there is a teacher."""
    greedy_scores_B: torch.Tensor | None = None
    """Scores of the greedy responses to the same prompts, if they were generated."""

    @property
    def scores_B(self) -> torch.Tensor:
        """The total reward of each response."""
        return self.rewards_BT.sum(dim=1)


@dataclass(frozen=True)
class Estimate:
    """The advantages of a step."""

    advantages_BT: torch.Tensor
    """Values at padding are not used. [B, 1] if all tokens of a response have the same advantage."""
    returns_BT: torch.Tensor | None = None
    """The critic's targets; None without a critic."""
