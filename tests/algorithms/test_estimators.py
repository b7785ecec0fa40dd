from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from hpc_rl.algorithms import advantages
from hpc_rl.algorithms.estimator_interface import AdvantageInputs
from hpc_rl.algorithms.estimators import ESTIMATORS
from hpc_rl.config.rl.algorithm import AlgorithmConfig

LENGTHS = torch.tensor([3, 2, 1, 2])
REWARDS = torch.tensor([-0.1, 0.2, 1.0, 0.3, 0.0, -1.0, 0.0, 2.0])
SCORES = torch.tensor([1.1, 0.3, -1.0, 2.0])
GROUPS = torch.tensor([4, 4, 0, 0])
TEACHER = torch.tensor([0.1, -0.2, 0.3, 0.4, 0.5, -0.6, 0.7, 0.8])
OUTCOME = AdvantageInputs(
    REWARDS,
    LENGTHS,
    GROUPS,
    gamma=0.9,
    lam=0.8,
    values_N=REWARDS.flip(0),
    teacher_N=TEACHER,
    greedy_scores_B=torch.ones(4),
)


def test_every_configured_name_has_an_estimator() -> None:
    assert list(ESTIMATORS) == list(get_args(AlgorithmConfig.model_fields["advantage"].annotation))


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "gae": advantages.whiten(advantages.gae(REWARDS, REWARDS.flip(0), LENGTHS, 0.9, 0.8)[0]),
        "grpo": advantages.grpo(SCORES, GROUPS).repeat_interleave(LENGTHS),
        "dr_grpo": advantages.dr_grpo(SCORES, GROUPS).repeat_interleave(LENGTHS),
        "rloo": advantages.rloo(SCORES, GROUPS).repeat_interleave(LENGTHS),
        "remax": advantages.remax(REWARDS, LENGTHS, torch.ones_like(SCORES)),
        "reinforce_pp": advantages.reinforce_pp(REWARDS, LENGTHS, 0.9),
        "reinforce_pp_baseline": advantages.reinforce_pp_baseline(SCORES, GROUPS, LENGTHS),
        "opd": TEACHER,
    }.items(),
)
def test_each_name_is_its_formula(name: str, expected: torch.Tensor) -> None:
    estimate = ESTIMATORS[name](OUTCOME)
    torch.testing.assert_close(estimate.advantages_N, expected)
    assert (estimate.returns_N is None) == (name != "gae")


def test_grpo_has_the_configured_scale() -> None:
    for scale in ("batch", "none"):
        got = ESTIMATORS["grpo"](replace(OUTCOME, scale=scale)).advantages_N
        torch.testing.assert_close(got, advantages.grpo(SCORES, GROUPS, scale).repeat_interleave(LENGTHS))


def test_gae_returns_are_the_critics_targets() -> None:
    got = ESTIMATORS["gae"](OUTCOME).returns_N
    assert got is not None
    torch.testing.assert_close(got, advantages.gae(REWARDS, REWARDS.flip(0), LENGTHS, 0.9, 0.8)[1])


def test_what_an_estimator_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="critic"):
        ESTIMATORS["gae"](replace(OUTCOME, values_N=None))
    with pytest.raises(ValueError, match="teacher"):
        ESTIMATORS["opd"](replace(OUTCOME, teacher_N=None))
    with pytest.raises(ValueError, match="greedy"):
        ESTIMATORS["remax"](replace(OUTCOME, greedy_scores_B=None))


def test_the_teachers_part_is_the_log_ratio_of_each_token() -> None:
    got = advantages.opd(torch.tensor([-0.25, -1.0]), torch.tensor([-1.0, -0.5]), 2.0)
    assert got.tolist() == [1.5, -1.0]
