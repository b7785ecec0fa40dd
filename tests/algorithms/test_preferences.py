"""The losses on preferences, against their formulas written out in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from hpc_rl.algorithms.preferences import PAIR_LOSSES, Pairs, Strength, bradley_terry, kto, rewards

PAIRS = Pairs(
    chosen_P=torch.tensor([-4.0, -9.0, -2.5]),
    rejected_P=torch.tensor([-6.0, -3.0, -2.5]),
    ref_chosen_P=torch.tensor([-5.0, -8.0, -2.0]),
    ref_rejected_P=torch.tensor([-5.5, -4.0, -2.0]),
    chosen_tokens_P=torch.tensor([4.0, 6.0, 2.0]),
    rejected_tokens_P=torch.tensor([3.0, 2.0, 5.0]),
)
MARGINS = [(-4 + 5) - (-6 + 5.5), (-9 + 8) - (-3 + 4), (-2.5 + 2) - (-2.5 + 2)]
MEANS = [(-1.0, -2.0), (-1.5, -1.5), (-1.25, -0.5)]


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(logprob: float) -> float:
    p = math.exp(logprob)
    return p / (1 - p)


FORMULAS = {
    "sigmoid": [-0.9 * math.log(sigma(0.3 * m)) - 0.1 * math.log(sigma(-0.3 * m)) for m in MARGINS],
    "robust": [(-0.9 * math.log(sigma(0.3 * m)) + 0.1 * math.log(sigma(-0.3 * m))) / 0.8 for m in MARGINS],
    "ipo": [
        (1 / 4 - -0.5 / 3 - 1 / 0.6) ** 2,
        (-1 / 6 - 1 / 2 - 1 / 0.6) ** 2,
        (-0.5 / 2 - -0.5 / 5 - 1 / 0.6) ** 2,
    ],
    "hinge": [max(0.0, 1 - 0.3 * m) for m in MARGINS],
    "simpo": [-math.log(sigma(0.3 * (c - r) - 0.7)) for c, r in MEANS],
    "orpo": [-c - 0.3 * math.log(sigma(math.log(odds(c) / odds(r)))) for c, r in MEANS],
}


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_formulas(name: str) -> None:
    found_P = PAIR_LOSSES[name](PAIRS, Strength(0.3, label_smoothing=0.1, gamma=0.7))
    assert found_P.tolist() == pytest.approx(FORMULAS[name], rel=1e-5)


def test_without_smoothing_conservative_and_robust_dpo_are_dpo() -> None:
    plain = [-math.log(sigma(0.3 * m)) for m in MARGINS]
    for name in ("sigmoid", "robust"):
        assert PAIR_LOSSES[name](PAIRS, Strength(0.3)).tolist() == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_the_gradient_raises_the_chosen_and_lowers_the_rejected(name: str) -> None:
    chosen_P, rejected_P = PAIRS.chosen_P.clone().requires_grad_(), PAIRS.rejected_P.clone().requires_grad_()
    rest = (PAIRS.ref_chosen_P, PAIRS.ref_rejected_P, PAIRS.chosen_tokens_P, PAIRS.rejected_tokens_P)
    PAIR_LOSSES[name](Pairs(chosen_P, rejected_P, *rest), Strength(0.3, gamma=0.7)).sum().backward()
    assert chosen_P.grad is not None and rejected_P.grad is not None
    assert (chosen_P.grad < 0).all() and (rejected_P.grad > 0).all()


def test_certain_responses_have_finite_odds() -> None:
    zero_P = torch.zeros(1, requires_grad=True)
    one_P, ref_P = torch.ones(1), torch.zeros(1)
    loss_P = PAIR_LOSSES["orpo"](Pairs(zero_P, torch.tensor([-1.0]), ref_P, ref_P, one_P, one_P), Strength(0.1))
    loss_P.sum().backward()
    assert torch.isfinite(loss_P).all() and zero_P.grad is not None and torch.isfinite(zero_P.grad).all()


def test_rewards_compare_with_the_reference_if_there_is_one() -> None:
    chosen_P, rejected_P = rewards("sigmoid", PAIRS, Strength(2.0))
    assert chosen_P.tolist() == [2.0, -2.0, -1.0] and rejected_P.tolist() == [-1.0, 2.0, -1.0]
    chosen_P, rejected_P = rewards("simpo", PAIRS, Strength(2.0))
    assert list(zip(chosen_P.tolist(), rejected_P.tolist(), strict=True)) == [(2 * c, 2 * r) for c, r in MEANS]


def test_kto() -> None:
    ratio_P = torch.tensor([1.0, 1.0, -2.0])
    good_P = torch.tensor([True, False, False])
    found_P = kto(ratio_P, good_P, torch.tensor(0.5), 0.3, (1.5, 0.8))
    expected = [
        1.5 * (1 - sigma(0.3 * 0.5)),
        0.8 * (1 - sigma(-0.3 * 0.5)),
        0.8 * (1 - sigma(0.3 * 2.5)),
    ]
    assert found_P.tolist() == pytest.approx(expected, rel=1e-5)


def test_bradley_terry_with_a_margin() -> None:
    found_P = bradley_terry(torch.tensor([1.0, 0.5]), torch.tensor([-0.5, 0.5]), torch.tensor([0.0, 2.0]))
    assert found_P.tolist() == pytest.approx([-math.log(sigma(1.5)), -math.log(sigma(-2.0))], rel=1e-5)
