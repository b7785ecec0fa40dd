from __future__ import annotations

import math

import pytest
import torch

from hpc_rl.algorithms.correction import (
    correction_weights,
    importance_ratios,
    probability_difference,
    weight_statistics,
)

LENGTHS = torch.tensor([2, 1])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # p_trainer / p_rollout: 0.5 / 0.4, 0.1 / 0.2; 0.9 / 0.1
        ("token", [1.25, 0.5, 9.0]),
        ("sequence", [0.625, 0.625, 9.0]),
        ("geometric", [0.625**0.5, 0.625**0.5, 9.0]),
    ],
)
def test_ratios_by_hand(level: str, expected: list[float]) -> None:
    trainer = torch.tensor([0.5, 0.1, 0.9]).log().requires_grad_()
    ratios = importance_ratios(trainer, torch.tensor([0.4, 0.2, 0.1]).log(), LENGTHS, level)
    assert ratios.tolist() == pytest.approx(expected)
    assert not ratios.requires_grad and ratios.dtype == torch.float32


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ratios_stay_finite(level: str) -> None:
    trainer, rollout = torch.tensor([0.0, 0.0, -500.0]), torch.tensor([-500.0, -500.0, 0.0])
    expected = [math.exp(20), math.exp(20), math.exp(-20)]
    assert importance_ratios(trainer, rollout, LENGTHS, level).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("cap", "bounds", "expected"),
    [
        (2.0, None, [0.25, 0.5, 1.0, 2.0, 2.0]),
        (None, (0.5, 3.0), [0.0, 1.0, 1.0, 1.0, 0.0]),
        (2.0, (0.5, 3.0), [0.0, 0.5, 1.0, 2.0, 0.0]),
    ],
)
def test_weights_by_hand(cap: float | None, bounds: tuple[float, float] | None, expected: list[float]) -> None:
    ratios = torch.tensor([0.25, 0.5, 1.0, 3.0, 4.0])
    assert correction_weights(ratios, cap, bounds).tolist() == expected


@pytest.mark.parametrize(
    ("cap", "bounds", "expected"),
    [
        (2.0, None, (5.75 / 5, 0.4, 0.0, 5.75**2 / 5 / 9.3125)),  # weights 0.25, 0.5, 1, 2, 2
        (None, (0.5, 3.0), (0.6, 0.0, 0.4, 0.6)),  # weights 0, 1, 1, 1, 0
        (3.0, (0.5, 3.0), (0.9, 0.2, 0.4, 4.5**2 / 5 / 10.25)),  # weights 0, 0.5, 1, 3, 0
        (None, (5.0, 6.0), (0.0, 0.0, 1.0, 0.0)),
    ],
)
def test_statistics_of_weights_by_hand(
    cap: float | None, bounds: tuple[float, float] | None, expected: tuple[float, ...]
) -> None:
    found = weight_statistics(torch.tensor([0.25, 0.5, 1.0, 3.0, 4.0]), cap, bounds)
    assert found == pytest.approx(expected)


def test_difference_by_hand() -> None:
    # |0.5 - 0.4| = 0.1, |0.1 - 0.4| = 0.3: mean 0.2, deviation 0.1
    got = probability_difference(torch.tensor([0.5, 0.1]).log(), torch.tensor([0.4, 0.4]).log())
    assert got == pytest.approx((0.2, 0.3, 0.1))
    assert got.mean == pytest.approx(0.2) and got.max == pytest.approx(0.3)


def test_equal_log_probabilities_do_not_differ() -> None:
    logprobs = torch.tensor([-1.0])
    assert probability_difference(logprobs, logprobs) == (0.0, 0.0, 0.0)
    assert not math.isnan(probability_difference(logprobs, logprobs).std)
