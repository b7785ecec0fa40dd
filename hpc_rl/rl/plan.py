"""The arithmetic of a step: how many responses, mini-batches and updates, and what need not be computed."""

from __future__ import annotations

from typing import Literal

from hpc_rl.config.ppo import PpoConfig, engine_dtype, engine_spec
from hpc_rl.rl.dealing import mini_batches

OldLogprobs = Literal["skip", "rollout", "recompute"]


def responses_per_step(config: PpoConfig) -> int:
    return config.data.train_batch_size * config.rollout.n


def updates_per_step(config: PpoConfig) -> int:
    batches = len(mini_batches(responses_per_step(config), config.actor.mini_batch_size))
    return batches * config.actor.ppo_epochs


def old_logprobs(config: PpoConfig) -> OldLogprobs:
    """Where the policy's log-probabilities before a step's updates come from.

    skip: nothing needs them, since one update per step starts from ratios of 1.
    rollout: the engine computed them with the trainer's own float32 weights, so its numbers are the trainer's.
    recompute: by a forward pass.
    """
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.tis_cap is not None or rollout.calculate_log_probs:
        return "recompute"  # the point is to compare with the engine's
    if updates_per_step(config) == 1 and algorithm.kl.where != "reward":
        return "skip"
    device, dtype = config.trainer.device, config.model.dtype
    exact = device in engine_spec(config).exact_on and dtype == engine_dtype(rollout, device) == "float32"
    return "rollout" if exact else "recompute"


def describe(config: PpoConfig) -> str:
    """One line for the log: `64 prompts x 8 = 512 responses = 4 mini-batches of 128, x 1 epoch = 4 updates`."""
    prompts, n, epochs = config.data.train_batch_size, config.rollout.n, config.actor.ppo_epochs
    responses = responses_per_step(config)
    size = config.actor.mini_batch_size or responses
    count = len(mini_batches(responses, size))
    batches = f"{count} mini-batches of {size:,}" if count > 1 else "1 mini-batch"
    updates = updates_per_step(config)
    return (
        f"each step: {prompts:,} prompts x {n} = {responses:,} responses = {batches}, "
        f"x {epochs} epoch{'s' if epochs > 1 else ''} = {updates} update{'s' if updates > 1 else ''}; "
        f"micro-batches of at most {config.trainer.micro_tokens:,} tokens"
    )
