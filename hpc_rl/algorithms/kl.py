"""Estimators of the KL divergence between policy and reference, and the adaptive weight of the penalty.

The estimators are per token, from tokens that the policy sampled; http://joschu.net/blog/kl-approx.html defines and
names them. The log ratio is ref - policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_MAX_LOG_RATIO = 20.0
"""Limit before the exponential of k3. Where that overflows, the gradient would be NaN, whatever limit follows."""
_MAX_K3 = 10.0
"""Largest divergence of a token, at a log ratio of 2.6 or -11."""


def k1(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return policy - ref: unbiased, of either sign. It is useless as a loss, since its expected gradient is 0."""
    return logprobs_N - ref_logprobs_N


def k2(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return half the squared log ratio: biased, never negative. As a loss, its expected gradient is that of the
    divergence."""
    return 0.5 * (logprobs_N - ref_logprobs_N).square()


def k3(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return exp(log ratio) - 1 - log ratio: unbiased, never negative.

    The result is limited to 10, as in verl and OpenRLHF. A token beyond it has no gradient. It is over 13 times as
    likely under the reference, where the gradient would grow exponentially, or over e^11 times under the policy.
    """
    log_ratio_N = (ref_logprobs_N - logprobs_N).clamp(max=_MAX_LOG_RATIO)
    return (torch.expm1(log_ratio_N) - log_ratio_N).clamp(max=_MAX_K3)


def k3_unbiased(logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return the value of k3 with the gradient of k2.

    As a loss, the expected gradient of k3 is that of the reverse divergence, KL(ref || policy), while that of k2 is
    that of KL(policy || ref) (Tang and Munos 2025, https://arxiv.org/abs/2506.09477).
    """
    gradient_N = k2(logprobs_N, ref_logprobs_N)
    return k3(logprobs_N, ref_logprobs_N).detach() + (gradient_N - gradient_N.detach())


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3+": k3_unbiased,
}
"""algorithm.kl.estimator -> (logprobs, ref_logprobs) -> divergence, all of the same shape."""


@dataclass
class AdaptiveKl:
    """Adapt the weight of the divergence to a target (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593,
    section 2.2). Its state is `coef`.
    """

    coef: float
    target: float | None
    """Target divergence per response, in nats; None for a constant weight."""
    horizon: int
    """Number of responses over which the weight changes by its relative error."""

    def update(self, kl_per_response: float, n_responses: int) -> None:
        """Adapt the weight to a step's mean divergence. It changes by at most 20 %."""
        if self.target is None:
            return
        error = min(max(kl_per_response / self.target - 1.0, -0.2), 0.2)
        # The factor is limited to 1, because a step of more than five horizons could make the weight negative.
        self.coef *= 1.0 + error * min(n_responses / self.horizon, 1.0)
