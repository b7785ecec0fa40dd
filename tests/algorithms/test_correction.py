from __future__ import annotations

import math

import pytest
import torch

from hpc_rl.algorithms.correction import probability_difference, tis_weights


def test_weights_by_hand() -> None:
    # p_trainer / p_rollout: 0.5 / 0.4, 0.1 / 0.2, 0.9 / 0.1 held at the cap
    trainer = torch.tensor([0.5, 0.1, 0.9]).log().requires_grad_()
    weights = tis_weights(trainer, torch.tensor([0.4, 0.2, 0.1]).log(), cap=2.0)
    assert weights.tolist() == pytest.approx([1.25, 0.5, 2.0])
    assert not weights.requires_grad


def test_weights_stay_finite() -> None:
    assert tis_weights(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]), cap=2.0).tolist() == [2.0, 0.0]


def test_difference_by_hand() -> None:
    # |0.5 - 0.4| = 0.1, |0.1 - 0.4| = 0.3: mean 0.2, deviation 0.1
    got = probability_difference(torch.tensor([0.5, 0.1]).log(), torch.tensor([0.4, 0.4]).log())
    assert got == pytest.approx((0.2, 0.3, 0.1))
    assert got.mean == pytest.approx(0.2) and got.max == pytest.approx(0.3)


def test_equal_log_probabilities_do_not_differ() -> None:
    logprobs = torch.tensor([-1.0])
    assert probability_difference(logprobs, logprobs) == (0.0, 0.0, 0.0)
    assert not math.isnan(probability_difference(logprobs, logprobs).std)
