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
    to_tokens,
    whiten,
)
from hpc_rl.algorithms.outcome import Estimate, Outcome


def _gae(outcome: Outcome) -> Estimate:
    """Compute GAE and whiten it over the batch, as is usual with PPO."""
    if outcome.values_N is None:
        raise ValueError("gae needs the critic's values")
    advantages_N, returns_N = gae(outcome.rewards_N, outcome.values_N, outcome.lengths_B, outcome.gamma, outcome.lam)
    return Estimate(whiten(advantages_N), returns_N)


def _remax(outcome: Outcome) -> Estimate:
    if outcome.greedy_scores_B is None:
        raise ValueError("remax needs the scores of greedy responses")
    return Estimate(remax(outcome.rewards_N, outcome.lengths_B, outcome.greedy_scores_B))


def _opd(outcome: Outcome) -> Estimate:
    if outcome.teacher_N is None:
        raise ValueError("opd needs the teacher's log-probabilities")
    return Estimate(outcome.teacher_N)


ESTIMATORS: dict[str, Callable[[Outcome], Estimate]] = {
    "gae": _gae,
    "grpo": lambda o: Estimate(to_tokens(grpo(o.scores_B, o.groups_B, o.scale), o.lengths_B)),
    "dr_grpo": lambda o: Estimate(to_tokens(dr_grpo(o.scores_B, o.groups_B), o.lengths_B)),
    "rloo": lambda o: Estimate(to_tokens(rloo(o.scores_B, o.groups_B), o.lengths_B)),
    "reinforce_pp": lambda o: Estimate(reinforce_pp(o.rewards_N, o.lengths_B, o.gamma)),
    "reinforce_pp_baseline": lambda o: Estimate(reinforce_pp_baseline(o.scores_B, o.groups_B, o.lengths_B)),
    "remax": _remax,
    "opd": _opd,
}
"""algorithm.advantage -> estimator. An estimator raises ValueError if the outcome lacks a field that it needs."""
