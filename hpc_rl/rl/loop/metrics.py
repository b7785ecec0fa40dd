"""The metrics of a step. Most names are verl's; reward_std and frac_reward_zero_std are TRL's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import torch
from tensordict import TensorDict

from hpc_rl.algorithms.advantages import group_deviations
from hpc_rl.algorithms.correction import PROBS_DIFF_WARNING, probability_difference, weight_statistics
from hpc_rl.algorithms.losses import explained_variance
from hpc_rl.config.rl.algorithm import AlgorithmConfig
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.converse.transcripts import Conversed
from hpc_rl.rl.loop import experience as columns
from hpc_rl.rl.loop.scoring import Scoring
from hpc_rl.rl.loop.state import PpoState
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.rl.workers.learner import ROUTER, Sums
from hpc_rl.tracking.timeline import Timeline, new_timeline
from hpc_rl.training.perf import Clock, Span

PROBS_DIFF_DOCS = "docs/engines.md, section 'When engine and trainer disagree'"
STALE_WARNING = 0.05
"""KL(sampling policy, policy) per token over which old responses mislead the training, as for the updates of a step."""
LENGTH_PERCENTILES = (10, 50, 90)
OF_REWARDS = ("critic/score/", "critic/rewards/", "reward_std", "frac_reward_zero_std")
"""Beginnings of the names of metrics that a run without a reward does not have."""
OF_DRIVER = ("check_adapters", "adv", "update_weights", "save_checkpoint", "testing")
"""Phases in which the driver's time is that of the work: in the others, it may wait for several parts at a time."""
NO_SIGNAL_STEPS = 3
"""Number of consecutive steps without signal after which a warning is printed."""
NO_SIGNAL_REPEAT = 20
"""Number of further such steps after which it is printed again."""


def experience_metrics(experience: TensorDict, config: PpoConfig) -> dict[str, float]:
    """Measure the responses and their rewards. Those without a score are left out of the latter, and of advantages,
    returns and values."""
    scored_B = experience["scored"]
    scores_B = experience["scores"][scored_B]
    rewards_B = columns.sums(experience, "rewards")[scored_B]
    advantages_N = columns.of_responses(columns.flat(experience, "advantages"), scored_B, experience)
    metrics = {
        "critic/score/mean": scores_B.mean(),
        "critic/score/max": scores_B.max(),
        "critic/score/min": scores_B.min(),
        "critic/rewards/mean": rewards_B.mean(),
        "critic/advantages/mean": advantages_N.mean(),
        "critic/advantages/max": advantages_N.max(),
        "critic/advantages/min": advantages_N.min(),
        "response_length/clip_ratio": (~experience["finished"]).float().mean(),
        **_length_metrics("response_length", columns.lengths(experience)),
        **_length_metrics("prompt_length", columns.lengths(experience, "prompt_ids")),
        **_group_metrics(scores_B, experience["group"][scored_B]),
    }
    if "teacher_logprobs" in experience:
        policy_N, teacher_N = (columns.flat(experience, name) for name in ("old_logprobs", "teacher_logprobs"))
        metrics["actor/teacher_kl"] = columns.of_responses(policy_N - teacher_N, scored_B, experience).mean()
    if "returns" in experience:
        values_N, returns_N = (
            columns.of_responses(columns.flat(experience, name), scored_B, experience) for name in ("values", "returns")
        )
        metrics["critic/returns/mean"] = returns_N.mean()
        metrics["critic/values/mean"] = values_N.mean()
        metrics["critic/vf_explained_var"] = torch.tensor(explained_variance(values_N, returns_N))
    if not config.scores:
        metrics = {name: value for name, value in metrics.items() if not name.startswith(OF_REWARDS)}
    return {name: float(value) for name, value in metrics.items()} | _sampler_metrics(experience, config)


def _sampler_metrics(experience: TensorDict, config: PpoConfig) -> dict[str, float]:
    """Compare the weights that sampled the tokens with those of the trainer before the updates of the step."""
    algorithm, found = config.algorithm, dict[str, float]()
    if not (algorithm.corrects or config.rollout.calculate_log_probs):
        return found  # there is nothing to compare; see setup.old_logprobs
    if not config.truncates_logprobs:
        old_N, rollout_N = columns.flat(experience, "old_logprobs"), columns.flat(experience, "rollout_logprobs")
        found["training/rollout_log_ratio"] = float((rollout_N - old_N).mean())
        difference = probability_difference(old_N, rollout_N)
        found |= {f"training/rollout_probs_diff_{name}": value for name, value in difference._asdict().items()}
    if algorithm.corrects:
        ratios_N = columns.trainer_ratios(experience, algorithm)
        weights = weight_statistics(ratios_N, algorithm.tis_cap, algorithm.tis_bounds)
        found |= {f"training/is_weight/{name}": value for name, value in weights._asdict().items()}
    return found


def reward_metrics(scores: Scores) -> dict[str, float]:
    """Return the number of failed scores, and the mean of each component that the reward reported."""
    components = {f"reward/{name}": mean for name, mean in scores.component_means().items()}
    return {"critic/reward_errors": float(len(scores.errors)), **components}


def conversation_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Measure the conversations with an environment; no metric if the responses are none."""
    found = [one for one in completions if isinstance(one, Conversed)]
    if not found:
        return {}
    failed = [one.outcome.error is not None for one in found]
    return {
        "environment/turns/mean": float(np.mean([one.turns for one in found])),
        "environment/turns/max": float(max(one.turns for one in found)),
        "environment/tool_calls": float(np.mean([one.calls for one in found])),
        "environment/bad_calls": float(np.mean([one.bad_calls for one in found])),
        "environment/observation_length": float(np.mean([len(one.token_ids) - one.sampled for one in found])),
        "environment/errors": float(sum(failed)),
        "environment/truncated": float(
            np.mean([not one.finished and not error for one, error in zip(found, failed, strict=True)])
        ),
    }


def actor_metrics(sums: Sums) -> dict[str, float]:
    """Average the sums of the policy's updates."""
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
    return metrics | _router_metrics("actor", sums)


def critic_metrics(sums: Sums) -> dict[str, float]:
    """Average the sums of the critic's updates."""
    return {
        "critic/vf_loss": sums["loss"] / sums["updates"],
        "critic/vf_clipfrac": sums["clipped"] / sums["tokens"],
        "critic/grad_norm": sums["grad_norm"] / sums["updates"],
        "critic/lr": sums["lr"],
        **_router_metrics("critic", sums),
    }


def _router_metrics(role: str, sums: Sums) -> dict[str, float]:
    """Average the metrics of a mixture of experts over passes."""
    return {f"{role}/{name}": total / sums["updates"] for name, total in sums.items() if name.startswith(ROUTER)}


def perf_metrics(experience: TensorDict, seconds: dict[str, float], state: PpoState) -> dict[str, float]:
    """Measure speed and memory of a step, without saving and validation.

    Args:
        seconds: wall time of the step's phases.
    """
    lengths_B = columns.all_lengths(experience)
    tokens, step_s = int(lengths_B.sum()), sum(seconds.values())
    metrics = {
        "perf/total_num_tokens": float(state.total_tokens + tokens),
        "perf/time_per_step": step_s,
        "perf/tokens_per_s": tokens / step_s,
        "perf/throughput": tokens / step_s / state.gpus,
        "perf/max_memory_gb": state.actor.max_memory_gb().wait(),
    }
    update_s = seconds.get("timing_s/update_actor")
    # A critic in another pool is updated at the same time, and the wait for the actor is then not the actor's time.
    computes_alone = state.critic is None or state.critic is state.actor
    if state.peak is not None and update_s is not None and computes_alone:
        once = state.flops.of(lengths_B.tolist(), int(columns.lengths(experience).sum()))
        work = once * state.config.actor.ppo_epochs
        metrics["perf/mfu/actor"] = work / update_s / state.actor.size / state.peak
    return metrics


def rollout_metrics(
    queue: RequestQueue, busy_s: float, before: Sequence[int], seconds: dict[str, float], rejected: int | None
) -> dict[str, float]:
    """Measure the engines during a step.

    Args:
        busy_s: seconds that an engine has generated, on average, for this step and later ones.
        before: tokens of each engine at the beginning of the step.
        seconds: wall time of the step's phases.
        rejected: groups that were drawn and rejected; None if none can be.
    """
    metrics = {
        "perf/engine_idle_s": max(0.0, sum(seconds.values()) - busy_s),
        "rollout/repeated": float(queue.repeated),
        "rollout/lost_tokens": float(queue.lost_tokens),
    }
    tokens = [now - earlier for now, earlier in zip_longest(queue.tokens, before, fillvalue=0)]
    if lent := tokens[queue.own :]:
        metrics["rollout/lent_engines"] = float(sum(map(bool, lent)))
        metrics["rollout/lent_share"] = sum(lent) / max(1, sum(tokens))
    return metrics if rejected is None else {**metrics, "rollout/rejected_groups": float(rejected)}


def timeline(step: int, clock: Clock, groups: Sequence[WorkerGroup], queue: RequestQueue, scoring: Scoring) -> Timeline:
    """Return when engines, rewards and workers ran in the step that has just ended."""
    seconds = time.perf_counter() - clock.began
    own = {phase: spans for phase, spans in clock.spans.take().items() if phase in OF_DRIVER}
    pending = [group.take_spans() for group in groups]
    parts = [own, queue.spans.take(), scoring.take_spans()]
    for one in pending:
        found = one.wait()
        parts.append(not_before(-seconds, found, time.perf_counter() - clock.began - seconds))
    phases: dict[str, list[Span]] = {}
    for part in parts:
        for phase, spans in part.items():
            phases.setdefault(phase, []).extend((seconds + start, seconds + end) for start, end in spans)
    return new_timeline(step, seconds, phases)


def not_before(began: float, phases: dict[str, list[Span]], late_s: float) -> dict[str, list[Span]]:
    """Return a worker's spans, later if they begin before the step: on a busy machine, the worker takes them some time
    after it is asked, and they are relative to this time.

    Args:
        began: start of the step, in seconds as the spans have them.
        late_s: the longest time that this may have been.
    """
    earliest = min((start for spans in phases.values() for start, _ in spans), default=began)
    shift = min(late_s, max(0.0, began - earliest))
    return {phase: [(start + shift, end + shift) for start, end in spans] for phase, spans in phases.items()}


def has_signal(experience: TensorDict, algorithm: AlgorithmConfig) -> bool:
    """Return whether any token of the loss has an advantage other than 0. If none does, the step's rewards do not
    change the policy."""
    differs_N = columns.flat(experience, "advantages") != 0
    if algorithm.tis_bounds is not None:  # without bounds, no weight is 0
        differs_N &= columns.importance_weights(experience, algorithm).values() > 0
    return bool(columns.of_responses(differs_N, columns.teaching(experience, algorithm), experience).any())


def no_signal_warning(steps: int, metrics: dict[str, float]) -> str | None:
    """Return a warning after several consecutive steps without signal, else None.

    Args:
        steps: number of latest consecutive steps without signal.
        metrics: of the latest step.
    """
    if steps < NO_SIGNAL_STEPS or (steps - NO_SIGNAL_STEPS) % NO_SIGNAL_REPEAT:
        return None
    if "critic/score/min" not in metrics:
        return (
            f"warning: the last {steps} steps gave no learning signal: the policy and the teacher give the same "
            "probabilities; check teacher.path"
        )
    low, high = metrics["critic/score/min"], metrics["critic/score/max"]
    alike = f"every response scored {low:g}" if low == high else "the responses to each prompt all scored the same"
    if metrics["critic/advantages/min"] or metrics["critic/advantages/max"]:
        return (
            f"warning: the last {steps} steps gave no learning signal: all tokens whose advantages are not 0 are left "
            "out of the loss. With algorithm.mask_truncated=true, raise data.max_response_length if most responses "
            "reach it (response_length/clip_ratio); otherwise check algorithm.tis_bounds"
        )
    return (
        f"warning: the last {steps} steps gave no learning signal: all advantages are 0, because {alike}. If scores "
        "are low, check that the reward function recognises a correct response, and use easier prompts or a better "
        "initial model. If scores are high, use harder prompts. A higher rollout.n or rollout.temperature makes equal "
        "scores rarer; algorithm.filter_groups=true replaces prompts with equal scores"
    )


def sampler_warning(metrics: dict[str, float], staleness: int) -> str | None:
    """Return a warning if the policy that sampled the step's responses is too far from that of the trainer, else None:
    without staleness further than rounding explains, with it further than a step's updates should go."""
    if staleness:
        distance = metrics.get("training/rollout_log_ratio", metrics.get("actor/ppo_kl", 0.0))
        if distance <= STALE_WARNING:
            return None
        return (
            f"warning: the policy is {distance:.2f} nats per token from the one that sampled the responses (threshold: "
            f"{STALE_WARNING}): old responses mislead the training. Lower actor.optim.lr or rollout.staleness "
            f"({staleness})"
        )
    mean = metrics.get("training/rollout_probs_diff_mean", 0.0)
    if mean <= PROBS_DIFF_WARNING:
        return None
    return (
        f"warning: the rollout engine's probabilities differ from the trainer's by {mean:.3f} on average (threshold: "
        f"{PROBS_DIFF_WARNING}). {PROBS_DIFF_DOCS}, lists the causes and remedies"
    )


def _length_metrics(name: str, lengths_B: torch.Tensor) -> dict[str, torch.Tensor]:
    lengths_B = lengths_B.float()
    quantiles = torch.tensor([percentile / 100 for percentile in LENGTH_PERCENTILES])
    percentiles = torch.quantile(lengths_B, quantiles)
    return {
        f"{name}/mean": lengths_B.mean(),
        f"{name}/max": lengths_B.max(),
        f"{name}/min": lengths_B.min(),
        **{f"{name}/p{p}": value for p, value in zip(LENGTH_PERCENTILES, percentiles, strict=True)},
    }


def _group_metrics(scores_B: torch.Tensor, groups_B: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compare the scores of the responses to each prompt. Without several responses per prompt there is no metric."""
    deviations_G = group_deviations(scores_B, groups_B)
    if len(deviations_G) == 0:
        return {}
    return {
        "reward_std": deviations_G.mean(),
        "frac_reward_zero_std": (deviations_G == 0).double().mean(),
    }
