"""The loop of reinforcement learning: generate, score, compare, estimate, learn, hand over the weights."""

from __future__ import annotations

import time

import torch
from tensordict import TensorDict

from hpc_rl.config.schema import PpoConfig
from hpc_rl.engine.perf import Clock
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.rl import checkpoints, shaping
from hpc_rl.rl.metrics import (
    actor_metrics,
    critic_metrics,
    experience_metrics,
    perf_metrics,
    probs_diff_warning,
)
from hpc_rl.rl.sampling import Batch
from hpc_rl.rl.state import State
from hpc_rl.rl.validation import validate
from hpc_rl.tracking.report import write_report


def train(state: State) -> int:
    """Train to the end, or until the stop file is there.

    Returns:
        the process's exit code: 0, or 75 where starting again goes on.
    """
    config, stop = state.config, False
    if state.step == 0 and config.trainer.val_before_train and state.val:
        clock = Clock()
        with clock("testing"):
            metrics = test(state)
        state.tracker.log(0, {**metrics, **clock.seconds}, state.total_steps)
    while state.step < state.total_steps and not stop:
        clock = Clock()
        with clock("step"):
            metrics = step(state, clock)
            stop = state.run.stop.exists()
            last = state.step == state.total_steps
            if last or stop or save_is_due(state):
                with clock("save_checkpoint"):
                    checkpoints.save(state)
            if state.val and (last or due(state.step, config.trainer.test_freq)):
                with clock("testing"):
                    metrics |= test(state)
        state.tracker.log(state.step, {**metrics, **clock.seconds}, state.total_steps)
    return finish(state)


def step(state: State, clock: Clock) -> dict[str, float]:
    """One step; its metrics."""
    config, algorithm = state.config, state.config.algorithm
    with clock("gen"):
        state.rollout.wake()
        batch = state.sampler.draw(state.step)
        state.rollout.sleep()
        experience = batch.experience()
    for group in state.groups:
        group.hold(experience)
    # All are asked for at once: workers compute while rewards are still being scored.
    old = state.actor.logprobs() if state.old_logprobs == "recompute" else None
    ref = state.reference.ref_logprobs() if state.reference else None
    values = state.critic.values() if state.critic else None
    with clock("reward"):
        scores = batch.scored.wait()
        shaping.add_scores(experience, torch.from_numpy(scores.values), config)
    with clock("old_log_prob"):
        if state.old_logprobs == "rollout":
            experience["old_logprobs"] = experience["rollout_logprobs"]
        elif old is not None:
            experience["old_logprobs"] = old.wait()
    with clock("ref"):
        if ref is not None:
            experience["ref_logprobs"] = ref.wait()
    with clock("values"):
        if values is not None:
            experience["values"] = values.wait()
    with clock("adv"):
        kl_coef = state.kl.coef
        kl_mean = shaping.add_rewards(experience, algorithm, kl_coef)
        shaping.add_advantages(experience, algorithm, greedy_scores(batch))
        if kl_mean is not None:
            state.kl.update(kl_mean, len(batch.prompts))
    metrics: dict[str, float] = {}
    with clock("update_critic"):
        if state.critic is not None:
            sums = state.critic.update("critic", critic_columns(experience, config), state.step, state.total_steps)
            metrics |= critic_metrics(sums.wait())
    if state.step >= (config.critic.warmup_steps if state.critic else 0):
        with clock("update_actor"):
            sums = state.actor.update("actor", actor_columns(experience, config), state.step, state.total_steps)
            metrics |= actor_metrics(sums.wait(), kl_coef if algorithm.kl.where != "none" else None)
        with clock("update_weights"):
            state.rollout.sync()
    state.step += 1
    metrics |= experience_metrics(experience, config)
    metrics |= perf_metrics(experience, clock.seconds, state.gpus, state.total_tokens)
    state.total_tokens = int(metrics["perf/total_num_tokens"])
    metrics["critic/reward_errors"] = float(len(scores.errors))
    if kl_mean is not None:
        metrics["actor/reward_kl_penalty"] = kl_mean
    if warning := probs_diff_warning(metrics):
        print(warning, flush=True)
    return metrics


def actor_columns(experience: TensorDict, config: PpoConfig) -> dict[str, torch.Tensor]:
    """What the actor's loss needs."""
    names = ["advantages"]
    names += [name for name in ("old_logprobs",) if name in experience]
    names += ["ref_logprobs"] if config.algorithm.kl.where == "loss" else []
    found = {name: experience[name] for name in names}
    found["weights"] = shaping.loss_weights(experience, config, config.algorithm.loss_agg)
    if config.algorithm.tis_cap is not None:
        found["is_weights"] = shaping.importance_weights(experience, config.algorithm.tis_cap)
    return found


def critic_columns(experience: TensorDict, config: PpoConfig) -> dict[str, torch.Tensor]:
    """What the critic's loss needs."""
    weights = shaping.loss_weights(experience, config, "token-mean")
    return {"values": experience["values"], "returns": experience["returns"], "weights": weights}


def greedy_scores(batch: Batch) -> torch.Tensor | None:
    """ReMax's baseline for each response; None for other estimators."""
    if batch.greedy_scored is None:
        return None
    return torch.from_numpy(batch.greedy_scored.wait().values)[torch.tensor(batch.groups)]


def test(state: State) -> dict[str, float]:
    """Validate, and log the first texts."""
    state.rollout.wake()
    found = validate(state.val, state.rollout, state.scoring, state.tokenizer, state.config)
    state.rollout.sleep()
    state.tracker.log_samples(state.step, found.samples)
    return found.metrics


def finish(state: State) -> int:
    """Export, close the books and say how it ended."""
    done = state.step >= state.total_steps
    if done and state.config.trainer.export:
        checkpoints.export_model(state)
        print(f"model: {state.run.model}", flush=True)
    elif not done:
        print(f"stopped after step {state.step} of {state.total_steps}: saved, starting again goes on", flush=True)
    code = 0 if done else EXIT_STOPPED
    state.tracker.finish(code)
    if state.run.metrics.exists():
        print(f"report: {write_report(state.run)}", flush=True)
    return code


def due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def save_is_due(state: State) -> bool:
    """By steps or by time."""
    minutes = state.config.trainer.save_minutes
    late = minutes > 0 and time.monotonic() - state.saved_at >= 60 * minutes
    return late or due(state.step, state.config.trainer.save_freq)
