"""From scores to advantages: what the driver computes on a step's experience between generation and the updates."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from hpc_rl.algorithms import kl
from hpc_rl.algorithms.advantages import overlong_penalty, token_rewards
from hpc_rl.algorithms.correction import tis_weights
from hpc_rl.algorithms.estimators import ESTIMATORS, Outcome
from hpc_rl.algorithms.losses import LossAgg, response_weights
from hpc_rl.config.ppo import AlgorithmConfig, PpoConfig
from hpc_rl.rl import experience as columns
from hpc_rl.rl.dealing import mini_batches


def add_scores(experience: TensorDict, scores_B: torch.Tensor, config: PpoConfig) -> None:
    """Column `scores`: the reward, less the penalty for overlong responses."""
    algorithm = config.algorithm
    if algorithm.overlong_buffer:
        lengths_B, longest = columns.lengths(experience), config.data.max_response_length
        scores_B = scores_B + overlong_penalty(
            lengths_B, longest, algorithm.overlong_buffer, algorithm.overlong_penalty
        )
    experience["scores"] = scores_B


def add_rewards(experience: TensorDict, algorithm: AlgorithmConfig, kl_coef: float) -> float | None:
    """Column `rewards`.

    Returns:
        the mean divergence from the reference per response, in nats; None where the reward has no part of it.
    """
    rewards_BT = token_rewards(experience["scores"], columns.mask(experience))
    if algorithm.kl.where != "reward":
        experience["rewards"] = columns.unpadded(rewards_BT, experience)
        return None
    estimator = kl.ESTIMATORS[algorithm.kl.estimator]
    kl_BT = estimator(columns.padded(experience, "old_logprobs"), columns.padded(experience, "ref_logprobs"))
    experience["rewards"] = columns.unpadded(rewards_BT - kl_coef * kl_BT, experience)
    return float(kl_BT.sum(dim=1).mean())


def add_advantages(experience: TensorDict, algorithm: AlgorithmConfig, greedy_scores_B: torch.Tensor | None) -> None:
    """Columns `advantages` and, with a critic, `returns`.

    Args:
        greedy_scores_B: score of the greedy response to each response's prompt, for ReMax.
    """
    estimate = ESTIMATORS[algorithm.advantage](
        Outcome(
            rewards_BT=columns.padded(experience, "rewards"),
            mask_BT=columns.mask(experience),
            groups_B=experience["group"],
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            values_BT=columns.padded(experience, "values") if "values" in experience else None,
            greedy_scores_B=greedy_scores_B,
        )
    )
    experience["advantages"] = columns.unpadded(estimate.advantages_BT, experience)
    if estimate.returns_BT is not None:
        experience["returns"] = columns.unpadded(estimate.returns_BT, experience)


def loss_weights(experience: TensorDict, config: PpoConfig, mode: LossAgg) -> torch.Tensor:
    """A token column: what each token weighs in its mini-batch's loss, by the totals of that mini-batch."""
    lengths_B = columns.lengths(experience)
    parts = [
        response_weights(
            lengths_B[part],
            mode,
            max_length=config.data.max_response_length,
            total_tokens=int(lengths_B[part].sum()),
            total_responses=len(lengths_B[part]),
        )
        for part in mini_batches(len(lengths_B), config.actor.mini_batch_size)
    ]
    return columns.repeat(torch.cat(parts), experience)


def importance_weights(experience: TensorDict, cap: float) -> torch.Tensor:
    """A token column: truncated importance weights of the engine's samples."""
    old_N, rollout_N = (columns.flat(experience, name) for name in ("old_logprobs", "rollout_logprobs"))
    return columns.jagged(tis_weights(old_N, rollout_N, cap), columns.lengths(experience))
