"""The table of advantage estimators.

To add one, write a function `AdvantageInputs -> Advantages` in a new file (see estimator_interface.py), add a row to
ESTIMATORS, and add the name to AlgorithmConfig.advantage.
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
from hpc_rl.algorithms.estimator_interface import AdvantageInputs, Advantages


def _gae(inputs: AdvantageInputs) -> Advantages:
    """Compute GAE and whiten it over the batch, as is usual with PPO."""
    if inputs.values_N is None:
        raise ValueError("gae needs the critic's values")
    advantages_N, returns_N = gae(inputs.rewards_N, inputs.values_N, inputs.lengths_B, inputs.gamma, inputs.lam)
    return Advantages(whiten(advantages_N), returns_N)


def _remax(inputs: AdvantageInputs) -> Advantages:
    if inputs.greedy_scores_B is None:
        raise ValueError("remax needs the scores of greedy responses")
    return Advantages(remax(inputs.rewards_N, inputs.lengths_B, inputs.greedy_scores_B))


def _opd(inputs: AdvantageInputs) -> Advantages:
    if inputs.teacher_N is None:
        raise ValueError("opd needs the teacher's log-probabilities")
    return Advantages(inputs.teacher_N)


ESTIMATORS: dict[str, Callable[[AdvantageInputs], Advantages]] = {
    "gae": _gae,
    "grpo": lambda o: Advantages(to_tokens(grpo(o.scores_B, o.groups_B, o.scale), o.lengths_B)),
    "dr_grpo": lambda o: Advantages(to_tokens(dr_grpo(o.scores_B, o.groups_B), o.lengths_B)),
    "rloo": lambda o: Advantages(to_tokens(rloo(o.scores_B, o.groups_B), o.lengths_B)),
    "reinforce_pp": lambda o: Advantages(reinforce_pp(o.rewards_N, o.lengths_B, o.gamma)),
    "reinforce_pp_baseline": lambda o: Advantages(reinforce_pp_baseline(o.scores_B, o.groups_B, o.lengths_B)),
    "remax": _remax,
    "opd": _opd,
}
"""algorithm.advantage -> estimator. An estimator raises ValueError if the inputs lacks a field that it needs."""
