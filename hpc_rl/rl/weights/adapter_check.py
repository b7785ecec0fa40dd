"""Two checks that the policy's adapters (LoRA) reach the engines, which no option turns off.

Adapters that never arrive leave no error: engines would generate with the initial model for weeks. The checks compare
the log-probabilities of a step's responses under the policy, under the policy without its adapters (the base), and as
the engine reported them.

1. In the first step of a run, new adapters change nothing, so all three are equal.
2. After the first update, the engine's log-probabilities have moved away from the base's as the policy's have. Let d
   and e be the policy's and the engine's differences from the base, and c the factor in e = c d + noise: 1, or 0 if the
   engine ignores the adapters.
   - If the noise is small, the least-squares estimate of c, sum(d e) / sum(d d), has to be near 1.
   - In bfloat16, the first movements are smaller than the rounding of policy and base. That rounding is in d and e, and
     pulls the estimate to 0.5 whatever c is. It cancels in s = sum(d (2 e - d)) / sum(d d), which is positive if the
     engine is nearer to the policy than to the base, and negative if it is nearer to the base. The check decides when s
     is large and certain, and until then adds up the next steps.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from hpc_rl.algorithms.correction import probability_difference
from hpc_rl.errors import RunError

_PROBABILITY = 0.05
_LOG_RATIO = 0.1
"""Mean differences of probabilities and of their logarithms that rounding to bfloat16 does not explain. A model that is
still undecided has small probabilities everywhere, and so small differences between them."""
_NOISE = 0.1
"""Largest noise, relative to the square of the movement, at which the factor is estimated: 5 % of it are then lost."""
_ERROR = 0.05
"""Largest standard error of the factor."""
_TOLERANCE = 0.25
"""Largest distance of the factor from 1: five standard errors."""
_NEARER = 0.5
"""Smallest |s| that decides. If one of policy and base rounds more than the other, s moves too."""
_SIGMAS = 6
"""Number of standard errors that make s certain."""
_KEPT = 0.9
"""Weight of the earlier steps' sums: movements grow, and the rounding of early steps would hide them."""
_REMEDY = "the weight transfer or the engine loses or changes weights: report this with the run's logs"


class AdapterCheck:
    """The checks of one run.

    Args:
        adapters_are_new: whether the run starts with new adapters, which change nothing.
    """

    def __init__(self, adapters_are_new: bool) -> None:
        self.next: Literal["base", "movement"] | None = "base" if adapters_are_new else "movement"
        """The check that the next step makes; None after the last one."""
        self._sums = torch.zeros(6, dtype=torch.float64)

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
            if not (mean <= _PROBABILITY and ratio <= _LOG_RATIO):
                raise RunError(
                    f"model.lora: new adapters change nothing, but {whose} probabilities differ from those of the "
                    f"model without adapters by {mean:.3f} on average (limit: {_PROBABILITY}), and their "
                    f"logarithms by {ratio:.3f} (limit: {_LOG_RATIO}); {_REMEDY}"
                )
        self.next = "movement"
        return (
            "adapters: before the first update, the engine's probabilities equal those of the model without adapters "
            f"(mean difference {mean:.2g}, {len(base_N):,} tokens)"
        )

    def _compare_movements(self, policy_N: torch.Tensor, engine_N: torch.Tensor) -> str | None:
        nearer_N = policy_N * (2 * engine_N - policy_N)
        products = [policy_N.square(), policy_N * engine_N, engine_N.square(), nearer_N, nearer_N.square()]
        found = torch.stack([torch.ones_like(policy_N), *products]).sum(dim=1)
        self._sums = _KEPT * self._sums + found.to(self._sums)
        tokens, dd, de, ee, nearer, nearer_squared = self._sums.tolist()
        if not dd:  # no update yet
            return None
        slope = de / dd
        noise = max(0.0, ee - slope * de) / dd
        if not math.isfinite(slope) or (noise <= _NOISE and math.sqrt(noise / tokens) <= _ERROR):
            if not abs(slope - 1) <= _TOLERANCE:
                raise _not_moved(f"moved by {slope:.2f} times the policy's change (1 is right)", tokens)
            return self._succeeded(f"moved together with the policy's (slope {slope:.3f}", tokens)
        if abs(nearer) < max(_NEARER * dd, _SIGMAS * math.sqrt(nearer_squared)):
            return None
        if nearer < 0:
            raise _not_moved("stayed with those of the model without adapters", tokens)
        return self._succeeded(f"are nearer to the policy's than to the base's (s = {nearer / dd:.2f}", tokens)

    def _succeeded(self, what: str, tokens: float) -> str:
        self.next = None
        return f"adapters: the engine's log-probabilities {what}, {tokens:,.0f} tokens)"

    def unfinished(self) -> str | None:
        """Return a warning if the run ends before both checks were possible."""
        if self.next is None:
            return None
        return (
            "warning: the run was too short, or its updates too small, to check that its adapters reach the engine; "
            "compare val/score with the score of the exported model (hpc-rl eval)"
        )


def _not_moved(what: str, tokens: float) -> RunError:
    return RunError(
        f"model.lora: the adapters have changed the policy, and the engine's log-probabilities have {what}, so the "
        f"adapters do not reach the engine as they are ({tokens:,.0f} tokens); {_REMEDY}"
    )
