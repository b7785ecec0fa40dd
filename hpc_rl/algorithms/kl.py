"""How far the policy is from the reference, and the weight of a penalty for it.

Estimators of KL(policy || reference) per token, from tokens that the policy sampled
(http://joschu.net/blog/kl-approx.html, which names them). The log ratio is ref - policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_MAX_LOG_RATIO = 20.0


def k1(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """policy - ref: unbiased, of either sign. As a loss it has no use: its expected gradient is 0."""
    return logprobs_N - ref_logprobs_N


def k2(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Half the squared log ratio: biased, never negative. As a loss its expected gradient is that of the divergence."""
    return 0.5 * (logprobs_N - ref_logprobs_N).square()


def k3(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """exp(log ratio) - 1 - log ratio: unbiased, never negative.

    The log ratio is held at 20 from above, since exp overflows later; a token that the reference finds over e^20 times
    as likely has no gradient.
    """
    log_ratio_N = (ref_logprobs_N - logprobs_N).clamp(max=_MAX_LOG_RATIO)
    return torch.expm1(log_ratio_N) - log_ratio_N


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By the names of KlConfig.estimator: (logprobs, ref_logprobs) -> divergence, of any one shape."""


@dataclass
class AdaptiveKl:
    """The weight of the divergence, led to a target (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593,
    section 2.2). Its state is `coef`.
    """

    coef: float
    target: float | None
    """Divergence per response that is aimed at, in nats; None: the weight stays as it is."""
    horizon: int
    """Responses over which the weight moves by its relative error."""

    def update(self, kl_per_response: float, n_responses: int) -> None:
        """Take notice of a step's mean divergence. The weight changes by 20 % at most."""
        if self.target is None:
            return
        error = min(max(kl_per_response / self.target - 1.0, -0.2), 0.2)
        # Without the limit a step of more than five horizons could make the weight negative.
        self.coef *= 1.0 + error * min(n_responses / self.horizon, 1.0)
