"""The input and output of advantage estimators."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpc_rl.algorithms.advantages import total_of_each


@dataclass(frozen=True)
class AdvantageInputs:
    """The rewards of a step's responses, and what estimators need besides."""

    rewards_N: torch.Tensor
    """Reward of each token that was sampled, including the KL penalty if it is part of the reward."""
    lengths_B: torch.Tensor
    groups_B: torch.Tensor
    gamma: float = 1.0
    """Discount per token."""
    lam: float = 1.0
    """Lambda of GAE."""
    scale: str = "group"
    """By which deviation GRPO divides: group, batch or none."""
    values_N: torch.Tensor | None = None
    """The critic's values, if there is a critic."""
    teacher_N: torch.Tensor | None = None
    """What `advantages.opd` returns, if there is a teacher."""
    greedy_scores_B: torch.Tensor | None = None
    """Scores of the greedy responses to the same prompts, if they were generated."""

    @property
    def scores_B(self) -> torch.Tensor:
        """The total reward of each response."""
        return total_of_each(self.rewards_N, self.lengths_B)


@dataclass(frozen=True)
class Advantages:
    """The advantages of a step."""

    advantages_N: torch.Tensor
    returns_N: torch.Tensor | None = None
    """The critic's targets; None without a critic."""
