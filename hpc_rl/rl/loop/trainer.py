"""The training loop: generate, score, compare, estimate advantages, update, synchronise the engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import EXIT_STOPPED, RunError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.carriers.base import ColumnHandle
from hpc_rl.rl.loop.assignment import shuffled
from hpc_rl.rl.loop.batches import training_samples
from hpc_rl.rl.loop.draws import Batch
from hpc_rl.rl.loop.experience import (
    add_advantages,
    add_rewards,
    add_scores,
    importance_weights,
    loss_weights,
    scores_of,
)
from hpc_rl.rl.loop.metrics import (
    actor_metrics,
    conversation_metrics,
    critic_metrics,
    experience_metrics,
    has_signal,
    no_signal_warning,
    perf_metrics,
    reward_metrics,
    rollout_metrics,
    sampler_warning,
    timeline,
)
from hpc_rl.rl.loop.rows import correct_rows
from hpc_rl.rl.loop.scoring import NoBatchError, NoScoresError, refuse_no_baselines, refuse_no_scores
from hpc_rl.rl.loop.staleness import staleness_metrics, token_ages
from hpc_rl.rl.loop.state import PpoState
from hpc_rl.rl.loop.validation import validate
from hpc_rl.rl.workers.group import WorkerGroup, add_passes
from hpc_rl.rl.workers.learner import Sums
from hpc_rl.tracking.page.report import report_end
from hpc_rl.tracking.samples import TRAIN, VAL, records_training_samples
from hpc_rl.training.checkpoints.export import new_folder
from hpc_rl.training.loop import decide, run_steps, validate_first
from hpc_rl.training.perf import Clock
from hpc_rl.training.stopping import IN_VAIN, stopped_line

Order = NDArray[np.int64] | None
"""Order of the responses of a step that is cut into mini-batches, [B]; None: as they are."""
PHASES = {"old_logprobs": "old_log_prob", "ref_logprobs": "ref", "teacher_logprobs": "teacher", "values": "values"}
"""What the loop waits for, by the column that workers compute."""
ColumnsOf = Callable[[TensorDict, PpoConfig, Order], dict[str, torch.Tensor | ColumnHandle]]


def train(state: PpoState) -> int:
    """Train to the end, or until the run directory has a stop file.

    Returns:
        the process's exit code: 0, or 75 if the run stopped early and resumes when it is started again.
    """
    validate_first(state, lambda: test(state))
    state.stop = state.stopping.due(0)
    run_steps(
        state,
        step=lambda clock: whole_step(state, clock),
        save=lambda: save(state),
        validate=lambda: test(state),
        recorded=lambda clock: state.tracker.log_timeline(
            timeline(state.step, clock, state.groups, state.rollout.queue, state.scoring)
        ),
    )
    return finish(state)


def whole_step(state: PpoState, clock: Clock) -> dict[str, float]:
    """Make a step with what surrounds it: the trace, the memory of its rows, and the decision what follows it."""
    with traced(state):
        metrics = step(state, clock)
    if metrics and (state.critic is None or state.step > state.config.critic.warmup_steps):
        state.rows = correct_rows(state.config, state.rows, state.groups)
    with clock("carry"):
        state.carrier.clear()
    state.stop, state.save = decide(state, state.step) if metrics else (True, False)
    return metrics


def step(state: PpoState, clock: Clock) -> dict[str, float]:
    """Train one step.

    Until the first update, the step can be discarded: nothing has changed but the position in the data. After it, the
    step is completed, because a half-trained policy is of no use.

    Returns:
        its metrics; none if the run stops and the step was discarded.
    """
    config, algorithm = state.config, state.config.algorithm
    heart.at_step(state.step + 1)
    position, busy_s, tokens = state.batches.position, state.rollout.queue.busy_s, list(state.rollout.queue.tokens)
    with clock("gen"):
        state.rollout.wake()
        try:
            batch = state.batches.draw(state.step, lambda: stops(state, ["timing_s/gen"]))
        except NoBatchError as error:
            raise saved_first(state, error) from error
        state.rollout.sleep()
        experience = None if batch is None else batch.experience()
    if batch is None or experience is None or stops(state, clock.seconds):
        state.batches.position = position
        return {}
    version = state.rollout.queue.version
    try:
        evaluate(state, batch, experience, clock)
    except NoScoresError as error:
        state.batches.position = position
        raise saved_first(state, error) from error
    if stops(state, clock.seconds):
        state.batches.position = position
        return {}
    check_adapters(state, batch, experience, clock)
    with clock("adv"):
        kl_coef = state.kl.coef
        kl_mean = add_rewards(experience, algorithm, kl_coef)
        add_advantages(experience, algorithm, greedy_scores(batch, config), config.teacher.coeff)
        if kl_mean is not None:
            state.kl.update(kl_mean, len(batch.prompts))
    metrics = learn(state, experience, clock)
    state.step += 1
    state.stopping.note_step(clock.seconds)
    metrics |= experience_metrics(experience, config)
    metrics |= reward_metrics(batch.scored.wait())
    metrics |= conversation_metrics(batch.completions)
    metrics |= perf_metrics(experience, clock.seconds, state)
    metrics |= rollout_metrics(
        state.rollout.queue,
        state.rollout.queue.busy_s - busy_s,
        tokens,
        clock.seconds,
        state.batches.rejected if algorithm.filter_groups else None,
    )
    if config.rollout.staleness:
        metrics |= staleness_metrics(batch.completions, version)
    state.total_tokens = int(metrics["perf/total_num_tokens"])
    if algorithm.kl.where != "none":
        metrics["actor/kl_coef"] = kl_coef
    if kl_mean is not None:
        metrics["actor/reward_kl_penalty"] = kl_mean
    state.steps_without_signal = 0 if has_signal(experience, algorithm) else state.steps_without_signal + 1
    too_far = sampler_warning(metrics, config.rollout.staleness)
    for warning in (no_signal_warning(state.steps_without_signal, metrics), too_far):
        if warning is not None:
            print(warning, flush=True)
    if records_training_samples(state.step, state.total_steps):
        state.tracker.log_samples(state.step, training_samples(batch, state.tokenizer), TRAIN)
    return metrics


@contextmanager
def traced(state: PpoState) -> Iterator[None]:
    """Trace the next step on all workers, if it is one of trainer.profile_steps."""
    number = state.step + 1
    if number not in state.config.trainer.profile_steps:
        yield
        return
    for pending in [group.begin_trace() for group in state.groups]:
        pending.wait()
    yield
    for pending in [group.end_trace(state.run, number) for group in state.groups]:
        pending.wait()


def stops(state: PpoState, done: Collection[str]) -> bool:
    """Return whether the run stops now, within a step.

    Args:
        done: names of the phases of the step that are done, or almost.
    """
    return state.stopping.due(state.stopping.rest_s(set(done) - {"timing_s/carry"}))  # which also begins the updates


def evaluate(state: PpoState, batch: Batch, experience: TensorDict, clock: Clock) -> None:
    """Add the scores, and the columns that policy, reference, teacher and critic compute for the responses."""
    with clock("carry"):
        held = [group.hold(experience, state.config.actor.mini_batch_size) for group in state.groups]
    # All calls start before the first wait, so that workers compute while rewards are still being scored.
    state.computed.begin(batch.prompts, batch.groups, batch.completions)
    computed = state.computed.take()
    with clock("reward"):
        for pending in held:  # a reward model on the same workers scores first
            pending.wait()
        scores = batch.scored.wait()
        if not state.config.algorithm.filter_groups:  # else each draw has been checked, and these have scores
            refuse_no_scores(scores, state.step + 1)
        add_scores(experience, torch.from_numpy(scores.values), state.config, greedy_scores(batch, state.config))
        if batch.greedy is not None:
            refuse_no_baselines(experience, batch.greedy.scored.wait(), state.step + 1)
    if state.old_logprobs == "rollout":
        experience["old_logprobs"] = experience["rollout_logprobs"]
    for name, column in computed.items():
        with clock(PHASES[name]):
            experience[name] = column.wait()


def check_adapters(state: PpoState, batch: Batch, experience: TensorDict, clock: Clock) -> None:
    """Check that the engines have the policy's adapters, in the first steps of a run with adapters.

    Only tokens that were sampled with the present weights can show it.

    Raises:
        RunError: they do not.
    """
    check = state.adapter_check
    if check is None or check.next is None:
        return
    is_new_N = torch.from_numpy(token_ages(batch.completions, state.rollout.queue.version) == 0)
    if not is_new_N.any():
        return
    with clock("check_adapters"):
        policy, base = state.actor.column("logprobs"), state.actor.column("ref_logprobs")
        engine_N = experience["rollout_logprobs"].values()
        line = check.compare(*(each_N[is_new_N] for each_N in (policy.wait().values(), base.wait().values(), engine_N)))
    if line is not None:
        print(line, flush=True)


def learn(state: PpoState, experience: TensorDict, clock: Clock) -> dict[str, float]:
    """Update critic and actor, and send the new weights to the engines. Return the metrics of the updates."""
    warming_up = state.critic is not None and state.step < state.config.critic.warmup_steps
    metrics: dict[str, float] = {}
    critic = actor = None
    with clock("carry"):
        if state.critic is not None:
            critic = update(state, state.critic, "critic", experience, critic_columns)
        if not warming_up:
            actor = update(state, state.actor, "actor", experience, actor_columns)
    if critic is not None:
        with clock("update_critic"):
            metrics |= critic_metrics(critic.wait())
    if actor is not None:
        with clock("update_actor"):
            metrics |= actor_metrics(actor.wait())
        with clock("update_weights"), state.batches.paused():
            state.rollout.sync()
    return metrics


def update(
    state: PpoState, group: WorkerGroup, role: str, experience: TensorDict, columns_of: ColumnsOf
) -> Pending[Sums]:
    """Start the updates of actor or critic: actor.ppo_epochs passes over the responses of a step.

    With actor.shuffle, each pass cuts them into other mini-batches, and the ranks get them again.
    """
    config, step, total = state.config, state.step, state.total_steps
    epochs = config.actor.ppo_epochs
    if not config.actor.shuffle:
        return group.update(role, columns_of(experience, config, None), step, total, epochs)
    started: list[Pending[Any]] = []
    for epoch in range(epochs):
        order = shuffled(len(experience), config.trainer.seed, step, epoch)
        started.append(group.hold(experience, config.actor.mini_batch_size, order))
        started.append(group.update(role, columns_of(experience, config, order), step, total, 1))
    return Pending.of_all(started).then(lambda results: add_passes(results[1::2]))


def actor_columns(experience: TensorDict, config: PpoConfig, order: Order) -> dict[str, torch.Tensor | ColumnHandle]:
    """Return the columns that the actor's loss needs, for mini-batches of this order."""
    names = ["advantages"]
    names += ["old_logprobs"] if "old_logprobs" in experience else []
    names += ["ref_logprobs"] if config.algorithm.kl.where == "loss" else []
    found = {name: experience[name] for name in names}
    found["weights"] = loss_weights(experience, config, config.algorithm.loss_agg, order)
    if config.algorithm.corrects:
        found["is_weights"] = importance_weights(experience, config.algorithm)
    return found


def critic_columns(experience: TensorDict, config: PpoConfig, order: Order) -> dict[str, torch.Tensor | ColumnHandle]:
    """Return the columns that the critic's loss needs, for mini-batches of this order."""
    weights = loss_weights(experience, config, "token-mean", order)
    return {"values": experience["values"], "returns": experience["returns"], "weights": weights}


def greedy_scores(batch: Batch, config: PpoConfig) -> torch.Tensor | None:
    """Return ReMax's baseline for each response, or None for other estimators."""
    if batch.greedy is None:
        return None
    rewards_G = torch.from_numpy(batch.greedy.scored.wait().values)
    lengths_G = torch.tensor([completion.sampled for completion in batch.greedy.completions])
    return scores_of(rewards_G, lengths_G, config)[torch.tensor(batch.groups)]


def test(state: PpoState) -> dict[str, float]:
    """Validate, log the first samples, and return the metrics; none if the run stops meanwhile. The engines stay awake
    for the next step."""
    with state.batches.paused():
        state.rollout.wake()
        found = validate(
            state.val, state.queue, state.scoring, state.tokenizer, state.config, lambda: state.stopping.due(0.0)
        )
    if found is None:
        state.stop = True
        return {}
    state.tracker.log_samples(state.step, found.samples, VAL)
    return found.metrics


def finish(state: PpoState) -> int:
    """Export the model if the run is complete, write the report, and return the exit code."""
    state.saver.wait()
    state.tracker.name_left_out()
    done = state.step >= state.total_steps
    if done and state.config.trainer.export:
        state.rollout.sleep()
        with heart.phase("export"), new_folder(state.run.path, state.run.model, replace=True) as (path, partial):
            state.actor.export(path, partial).wait()
        print(f"model: {state.run.model}", flush=True)
    elif not done:
        if state.stopping.is_in_vain():
            raise RunError(IN_VAIN)
        print(stopped_line(state.step, state.total_steps), flush=True)
    if done and state.adapter_check is not None and (warning := state.adapter_check.unfinished()) is not None:
        print(warning, flush=True)
    code = 0 if done else EXIT_STOPPED
    state.tracker.finish(code)
    if state.run.metrics.exists():
        print(report_end(state.run, code), flush=True)
    return code


def save(state: PpoState) -> None:
    """Write a checkpoint, unless there is one of this step."""
    if state.saved_step == state.step:
        return
    if state.config.trainer.offload != "none":
        state.rollout.sleep()  # a whole model comes to the GPU, on which engines may already have new weights
    progress = state.progress(state.batches.position, len(state.train), state.actor.size)
    kl_coef = None if state.kl.target is None else state.kl.coef
    state.saver.save(replace(progress, kl_coef=kl_coef))
    state.saved_step, state.saved_at = state.step, time.monotonic()


def saved_first(state: PpoState, error: NoBatchError) -> RunError:
    """Save the weights, which the failed step has not changed; return the error for the user."""
    if state.step == 0:
        return error
    save(state)
    state.saver.wait()
    repair = "repair the reward and " if isinstance(error, NoScoresError) else ""
    return RunError(f"{error}; saved after step {state.step}: {repair}start the run again to resume")
