"""Two checks that the policy's adapters (LoRA) reach the engines, which no option turns off.

Adapters that never arrive leave no error: engines would generate with the initial model for weeks. The checks compare
the log-probabilities of a step's responses under the policy, under the policy without its adapters (the base), and as
the engine reported them.

1. In the first step of a run, new adapters change nothing, so all three are equal.
2. After the first update, the engine's log-probabilities have moved away from the base's as the policy's have. With d
   and e the policy's and the engine's differences from the base, e = c d + noise has c = 1, and c = 0 if the engine
   ignores the adapters. The least-squares estimate of c is sum(d e) / sum(d d). Steps are added up until its standard
   error is small: a small update hides in the rounding of an engine in bfloat16.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from hpc_rl.algorithms.correction import PROBS_DIFF_WARNING, probability_difference
from hpc_rl.errors import RunError

_LOG_RATIO = 0.1
"""Mean difference of log-probabilities that rounding to bfloat16 does not explain. A model that is still undecided has
small probabilities everywhere, and so small differences between them."""
_ERROR = 0.05
"""Standard error of the slope at which the second check decides."""
_TOLERANCE = 0.25
"""Largest distance of the slope from 1: five standard errors."""
_REMEDY = "the weight transfer, or the engine's version, loses or changes weights: report it with the run's logs"


class AdapterCheck:
    """The checks of one run.

    Args:
        adapters_are_new: whether the run starts with new adapters, which change nothing.
    """

    def __init__(self, adapters_are_new: bool) -> None:
        self.next: Literal["base", "movement"] | None = "base" if adapters_are_new else "movement"
        """The check that the next step makes; None after the last one."""
        self._dd = self._de = self._ee = 0.0
        self._tokens = 0

    def compare(self, policy_N: torch.Tensor, base_N: torch.Tensor, engine_N: torch.Tensor) -> str | None:
        """Check a step's log-probabilities, of which the weights are those that the engine sampled with.

        Returns:
            a line about a check that succeeded.

        Raises:
            RunError: a check failed.
        """
        if self.next == "base":
            return self._compare_with_base(policy_N, base_N, engine_N)
        return self._compare_movements((policy_N - base_N).double(), (engine_N - base_N).double())

    def _compare_with_base(self, policy_N: torch.Tensor, base_N: torch.Tensor, engine_N: torch.Tensor) -> str:
        for whose, logprobs_N in {"the policy's": policy_N, "the engine's": engine_N}.items():
            mean = probability_difference(logprobs_N, base_N).mean
            ratio = float((logprobs_N - base_N).abs().mean())
            if not (mean <= PROBS_DIFF_WARNING and ratio <= _LOG_RATIO):
                raise RunError(
                    f"model.lora: new adapters change nothing, but {whose} probabilities differ from those of the "
                    f"model without adapters by {mean:.3f} on average (limit: {PROBS_DIFF_WARNING}), and their "
                    f"logarithms by {ratio:.3f} (limit: {_LOG_RATIO}); {_REMEDY}"
                )
        self.next = "movement"
        return (
            "adapters: before the first update, the engine's probabilities equal those of the model without adapters "
            f"(mean difference {mean:.2g}, {len(base_N):,} tokens)"
        )

    def _compare_movements(self, policy_N: torch.Tensor, engine_N: torch.Tensor) -> str | None:
        self._dd += float(policy_N.square().sum())
        self._de += float((policy_N * engine_N).sum())
        self._ee += float(engine_N.square().sum())
        self._tokens += len(policy_N)
        if not self._dd:  # no update yet
            return None
        slope = self._de / self._dd
        noise = max(0.0, self._ee - slope * self._de) / self._tokens
        if math.isfinite(slope) and math.sqrt(noise / self._dd) > _ERROR:
            return None
        if not abs(slope - 1) <= _TOLERANCE:
            raise RunError(
                f"model.lora: the adapters have changed the policy, and the engine's log-probabilities have moved by "
                f"{slope:.2f} times the policy's change (1 is right, 0 means that the adapters do not reach the "
                f"engine; {self._tokens:,} tokens); {_REMEDY}"
            )
        self.next = None
        return (
            f"adapters: the engine's log-probabilities moved together with the policy's (slope {slope:.3f}, "
            f"{self._tokens:,} tokens)"
        )

    def unfinished(self) -> str | None:
        """Return a warning if the run ends before both checks were possible."""
        if self.next is None:
            return None
        return (
            "warning: the run was too short, or its updates too small, to see that its adapters reach the engine; "
            "compare the scores of val/ with those of the exported model"
        )
