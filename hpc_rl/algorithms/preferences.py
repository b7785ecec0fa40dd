"""Losses on preferences: pure functions of log-probabilities, one value per pair or response.

Suffix P: pairs, or labelled responses. `chosen_P` and `rejected_P` are sums over the tokens of a response; the
reference's are 0 if a loss uses none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

_MOST_LOGPROB = -1e-6
"""Largest mean log-probability in the odds ratio: beyond it, 1 - p is 0 in float32."""


@dataclass(frozen=True)
class Pairs:
    """The log-probabilities of pairs, each [P]."""

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor
    ref_chosen_P: torch.Tensor
    ref_rejected_P: torch.Tensor
    chosen_tokens_P: torch.Tensor
    """Tokens of the chosen responses."""
    rejected_tokens_P: torch.Tensor

    @property
    def chosen_ratio_P(self) -> torch.Tensor:
        return self.chosen_P - self.ref_chosen_P

    @property
    def rejected_ratio_P(self) -> torch.Tensor:
        return self.rejected_P - self.ref_rejected_P

    @property
    def chosen_mean_P(self) -> torch.Tensor:
        """The log-probability per token."""
        return self.chosen_P / self.chosen_tokens_P

    @property
    def rejected_mean_P(self) -> torch.Tensor:
        return self.rejected_P / self.rejected_tokens_P


@dataclass(frozen=True)
class Strength:
    """The numbers of a loss; each loss uses some of them."""

    beta: float
    label_smoothing: float = 0.0
    gamma: float = 0.0


def sigmoid(pairs: Pairs, strength: Strength) -> torch.Tensor:
    """DPO: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7.

    With label smoothing conservative DPO: Mitchell 2023, https://ericmitchell.ai/cdpo.pdf.
    """
    margin_P, flipped = _margin(pairs, strength), strength.label_smoothing
    return -(1 - flipped) * logsigmoid(margin_P) - flipped * logsigmoid(-margin_P)


def robust(pairs: Pairs, strength: Strength) -> torch.Tensor:
    """Robust DPO: Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409. It has no bias if the assumed
    fraction of wrong pairs is right."""
    margin_P, flipped = _margin(pairs, strength), strength.label_smoothing
    return (-(1 - flipped) * logsigmoid(margin_P) + flipped * logsigmoid(-margin_P)) / (1 - 2 * flipped)


def ipo(pairs: Pairs, strength: Strength) -> torch.Tensor:
    """IPO: Azar et al. 2023, https://arxiv.org/abs/2310.12036, equation 17, with log-probabilities per token: the
    squared loss would otherwise grow with the lengths of the responses."""
    chosen_P = pairs.chosen_ratio_P / pairs.chosen_tokens_P
    rejected_P = pairs.rejected_ratio_P / pairs.rejected_tokens_P
    return (chosen_P - rejected_P - 1 / (2 * strength.beta)).square()


def hinge(pairs: Pairs, strength: Strength) -> torch.Tensor:
    """SLiC's hinge on the margin of DPO: Liu et al. 2023 (RSO), https://arxiv.org/abs/2309.06657."""
    return torch.relu(1 - _margin(pairs, strength))


def simpo(pairs: Pairs, strength: Strength) -> torch.Tensor:
    """SimPO: Meng et al. 2024, https://arxiv.org/abs/2405.14734, equation 6."""
    return -logsigmoid(strength.beta * (pairs.chosen_mean_P - pairs.rejected_mean_P) - strength.gamma)


def orpo(pairs: Pairs, strength: Strength) -> torch.Tensor:
    """ORPO: Hong et al. 2024, https://arxiv.org/abs/2403.07691, equations 6 and 7; beta is its lambda.

    The cross-entropy of the chosen response is part of the loss.
    """
    log_odds_P = _log_odds(pairs.chosen_mean_P) - _log_odds(pairs.rejected_mean_P)
    return -pairs.chosen_mean_P - strength.beta * logsigmoid(log_odds_P)


PAIR_LOSSES: dict[str, Callable[[Pairs, Strength], torch.Tensor]] = {
    "sigmoid": sigmoid,
    "robust": robust,
    "ipo": ipo,
    "hinge": hinge,
    "simpo": simpo,
    "orpo": orpo,
}
"""algorithm.loss -> loss of each pair, [P]."""


def rewards(loss: str, pairs: Pairs, strength: Strength) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the implicit rewards of the chosen and the rejected responses: beta times the log ratio to the reference
    or, for losses on means per token without a reference, beta times that mean."""
    if loss in ("simpo", "orpo"):
        return strength.beta * pairs.chosen_mean_P, strength.beta * pairs.rejected_mean_P
    return strength.beta * pairs.chosen_ratio_P, strength.beta * pairs.rejected_ratio_P


def kto(
    ratio_P: torch.Tensor,
    is_desirable_P: torch.Tensor,
    baseline: torch.Tensor,
    beta: float,
    weights: tuple[float, float],
) -> torch.Tensor:
    """KTO: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306.

    Args:
        ratio_P: log-probability of each response under the policy, minus that under the reference.
        baseline: estimate of the divergence from the reference, at least 0, without a gradient.
        weights: of desirable and of undesirable responses.
    """
    sign_P = torch.where(is_desirable_P, 1.0, -1.0)
    weight_P = torch.where(is_desirable_P, *weights)
    return weight_P * (1 - torch.sigmoid(beta * sign_P * (ratio_P - baseline)))


def bradley_terry(chosen_P: torch.Tensor, rejected_P: torch.Tensor, margin_P: torch.Tensor) -> torch.Tensor:
    """Return -log p(chosen is better) of a reward model's scores; with margins as in Touvron et al. 2023 (Llama 2),
    https://arxiv.org/abs/2307.09288, equation 2."""
    return -logsigmoid(chosen_P - rejected_P - margin_P)


def _margin(pairs: Pairs, strength: Strength) -> torch.Tensor:
    return strength.beta * (pairs.chosen_ratio_P - pairs.rejected_ratio_P)


def _log_odds(logprob_P: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p))."""
    logprob_P = logprob_P.clamp(max=_MOST_LOGPROB)
    return logprob_P - torch.log(-torch.expm1(logprob_P))
