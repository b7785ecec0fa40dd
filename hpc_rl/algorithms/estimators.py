"""The table of advantage estimators.

To add one, write a function `Outcome -> Estimate` in a new file (see outcome.py), add a row to ESTIMATORS, and
add the name to AlgorithmConfig.advantage.
"""

from __future__ import annotations

from collections.abc import Callable

from hpc_rl.algorithms.advantages import (
    dr_grpo,
    gae,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    whiten,
)
from hpc_rl.algorithms.outcome import Estimate, Outcome


def _gae(outcome: Outcome) -> Estimate:
    """Compute GAE and whiten it over the batch, as is usual with PPO."""
    if outcome.values_BT is None:
        raise ValueError("gae needs the critic's values")
    advantages_BT, returns_BT = gae(outcome.rewards_BT, outcome.values_BT, outcome.mask_BT, outcome.gamma, outcome.lam)
    return Estimate(whiten(advantages_BT, outcome.mask_BT), returns_BT)


def _remax(outcome: Outcome) -> Estimate:
    if outcome.greedy_scores_B is None:
        raise ValueError("remax needs the scores of greedy responses")
    return Estimate(remax(outcome.rewards_BT, outcome.mask_BT, outcome.greedy_scores_B))


def _opd(outcome: Outcome) -> Estimate:
    if outcome.teacher_BT is None:
        raise ValueError("opd needs the teacher's log-probabilities")
    return Estimate(outcome.teacher_BT)


ESTIMATORS: dict[str, Callable[[Outcome], Estimate]] = {
    "gae": _gae,
    "grpo": lambda o: Estimate(grpo(o.scores_B, o.groups_B, o.scale)[:, None]),
    "dr_grpo": lambda o: Estimate(dr_grpo(o.scores_B, o.groups_B)[:, None]),
    "rloo": lambda o: Estimate(rloo(o.scores_B, o.groups_B)[:, None]),
    "reinforce_pp": lambda o: Estimate(reinforce_pp(o.rewards_BT, o.mask_BT, o.gamma)),
    "reinforce_pp_baseline": lambda o: Estimate(reinforce_pp_baseline(o.scores_B, o.groups_B, o.mask_BT)),
    "remax": _remax,
    "opd": _opd,
}
"""algorithm.advantage -> estimator. An estimator raises ValueError if the outcome lacks a field that it needs."""
