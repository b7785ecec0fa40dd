from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from hpc_rl.algorithms import advantages
from hpc_rl.algorithms.estimators import ESTIMATORS
from hpc_rl.algorithms.outcome import Outcome
from hpc_rl.config.algorithm import AlgorithmConfig

MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False], [True, True, False]])
REWARDS = torch.tensor([[-0.1, 0.2, 1.0], [0.3, 0.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
SCORES = torch.tensor([1.1, 0.3, -1.0, 2.0])
GROUPS = torch.tensor([4, 4, 0, 0])
TEACHER = torch.tensor([[0.1, -0.2, 0.3], [0.4, 0.5, 0.0], [-0.6, 0.0, 0.0], [0.7, 0.8, 0.0]])
OUTCOME = Outcome(
    REWARDS,
    MASK,
    GROUPS,
    gamma=0.9,
    lam=0.8,
    values_BT=REWARDS.flip(0),
    teacher_BT=TEACHER,
    greedy_scores_B=torch.ones(4),
)


def test_every_configured_name_has_an_estimator() -> None:
    assert list(ESTIMATORS) == list(get_args(AlgorithmConfig.model_fields["advantage"].annotation))


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "gae": advantages.whiten(advantages.gae(REWARDS, REWARDS.flip(0), MASK, 0.9, 0.8)[0], MASK),
        "grpo": advantages.grpo(SCORES, GROUPS)[:, None] * MASK,
        "dr_grpo": advantages.dr_grpo(SCORES, GROUPS)[:, None] * MASK,
        "rloo": advantages.rloo(SCORES, GROUPS)[:, None] * MASK,
        "remax": advantages.remax(REWARDS, MASK, torch.ones_like(SCORES)),
        "reinforce_pp": advantages.reinforce_pp(REWARDS, MASK, 0.9),
        "reinforce_pp_baseline": advantages.reinforce_pp_baseline(SCORES, GROUPS, MASK),
        "opd": TEACHER,
    }.items(),
)
def test_each_name_is_its_formula(name: str, expected: torch.Tensor) -> None:
    estimate = ESTIMATORS[name](OUTCOME)
    torch.testing.assert_close(estimate.advantages_BT * MASK, expected)
    assert (estimate.returns_BT is None) == (name != "gae")


def test_grpo_has_the_configured_scale() -> None:
    for scale in ("batch", "none"):
        got = ESTIMATORS["grpo"](replace(OUTCOME, scale=scale)).advantages_BT
        torch.testing.assert_close(got, advantages.grpo(SCORES, GROUPS, scale)[:, None])


def test_gae_returns_are_the_critics_targets() -> None:
    got = ESTIMATORS["gae"](OUTCOME).returns_BT
    assert got is not None
    torch.testing.assert_close(got, advantages.gae(REWARDS, REWARDS.flip(0), MASK, 0.9, 0.8)[1])


def test_what_an_estimator_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="critic"):
        ESTIMATORS["gae"](replace(OUTCOME, values_BT=None))
    with pytest.raises(ValueError, match="teacher"):
        ESTIMATORS["opd"](replace(OUTCOME, teacher_BT=None))
    with pytest.raises(ValueError, match="greedy"):
        ESTIMATORS["remax"](replace(OUTCOME, greedy_scores_B=None))


def test_the_teachers_part_is_the_log_ratio_of_each_token() -> None:
    policy = torch.full((4, 3), -1.0)
    got = advantages.opd(torch.full((4, 3), -0.25), policy, MASK, 2.0)
    torch.testing.assert_close(got, 1.5 * MASK)
