"""What a step reports, under the names that users of verl know."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from hpc_rl.algorithms.correction import probability_difference
from hpc_rl.algorithms.losses import explained_variance
from hpc_rl.config.ppo import PpoConfig
from hpc_rl.rl import experience as columns
from hpc_rl.rl.state import State
from hpc_rl.rl.workers.learner import Sums

PROBS_DIFF_WARNING = 0.01
PROBS_DIFF_DOCS = "docs/rl.md, section 'When engine and trainer disagree'"


def experience_metrics(experience: TensorDict, config: PpoConfig) -> dict[str, float]:
    """Of the responses and what they earned."""
    lengths_B = columns.lengths(experience).float()
    prompts_B = columns.lengths(experience, "prompt_ids").float()
    scores_B = experience["scores"]
    rewards_B = columns.padded(experience, "rewards").sum(dim=1)
    advantages_N = columns.flat(experience, "advantages")
    metrics = {
        "critic/score/mean": scores_B.mean(),
        "critic/score/max": scores_B.max(),
        "critic/score/min": scores_B.min(),
        "critic/rewards/mean": rewards_B.mean(),
        "critic/advantages/mean": advantages_N.mean(),
        "critic/advantages/max": advantages_N.max(),
        "critic/advantages/min": advantages_N.min(),
        "response_length/mean": lengths_B.mean(),
        "response_length/max": lengths_B.max(),
        "response_length/min": lengths_B.min(),
        "response_length/clip_ratio": (~experience["finished"]).float().mean(),
        "prompt_length/mean": prompts_B.mean(),
    }
    if "returns" in experience:
        values_N, returns_N = columns.flat(experience, "values"), columns.flat(experience, "returns")
        metrics["critic/returns/mean"] = returns_N.mean()
        metrics["critic/values/mean"] = values_N.mean()
        metrics["critic/vf_explained_var"] = torch.tensor(explained_variance(values_N, returns_N))
    if config.rollout.calculate_log_probs:
        old_N, rollout_N = columns.flat(experience, "old_logprobs"), columns.flat(experience, "rollout_logprobs")
        difference = probability_difference(old_N, rollout_N)
        metrics |= {f"training/rollout_probs_diff_{name}": torch.tensor(v) for name, v in difference._asdict().items()}
    return {name: float(value) for name, value in metrics.items()}


def actor_metrics(sums: Sums) -> dict[str, float]:
    tokens, updates = sums["tokens"], sums["updates"]
    metrics = {
        "actor/pg_loss": sums["pg_loss"] / updates,
        "actor/pg_clipfrac": sums["clipped"] / tokens,
        "actor/ppo_kl": sums["kl"] / tokens,
        "actor/entropy": sums["entropy"] / tokens,
        "actor/grad_norm": sums["grad_norm"] / updates,
        "actor/lr": sums["lr"],
    }
    if "kl_loss" in sums:
        metrics["actor/kl_loss"] = sums["kl_loss"] / tokens
    return metrics


def critic_metrics(sums: Sums) -> dict[str, float]:
    return {
        "critic/vf_loss": sums["loss"] / sums["updates"],
        "critic/vf_clipfrac": sums["clipped"] / sums["tokens"],
        "critic/grad_norm": sums["grad_norm"] / sums["updates"],
        "critic/lr": sums["lr"],
    }


def perf_metrics(experience: TensorDict, seconds: dict[str, float], state: State) -> dict[str, float]:
    """Speed and memory of a step; saving and validation are no part of it.

    Args:
        seconds: wall time of the step's phases.
    """
    lengths_B = columns.lengths(experience) + columns.lengths(experience, "prompt_ids")
    tokens, step_s = int(lengths_B.sum()), sum(seconds.values())
    metrics = {
        "perf/total_num_tokens": float(state.total_tokens + tokens),
        "perf/time_per_step": step_s,
        "perf/tokens_per_s": tokens / step_s,
        "perf/throughput": tokens / step_s / state.gpus,
        "perf/max_memory_gb": state.actor.max_memory_gb().wait(),
    }
    update_s = seconds.get("timing_s/update_actor")
    computes_alone = state.critic is None or state.critic is state.actor  # else it is not the time that was waited for
    if state.peak is not None and update_s is not None and computes_alone:
        once = state.flops.of(lengths_B.tolist(), int(columns.lengths(experience).sum()))
        work = once * state.config.actor.ppo_epochs
        metrics["perf/mfu/actor"] = work / update_s / state.actor.size / state.peak
    return metrics


def probs_diff_warning(metrics: dict[str, float]) -> str | None:
    """A line to show where engine and trainer disagree more than rounding explains."""
    mean = metrics.get("training/rollout_probs_diff_mean", 0.0)
    if mean <= PROBS_DIFF_WARNING:
        return None
    return (
        f"warning: the rollout engine's probabilities are {mean:.3f} off the trainer's on average (over "
        f"{PROBS_DIFF_WARNING}): known causes and remedies are in {PROBS_DIFF_DOCS}"
    )
