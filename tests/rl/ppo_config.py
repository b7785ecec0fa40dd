"""A small configuration for tests of pure functions; its files need not exist."""

from __future__ import annotations

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.ppo import PpoConfig

REQUIRED = ("model.path=/model", "data.train_files=train.jsonl", "reward.function=exact")
SMALL = ("trainer.device=cpu", "data.train_batch_size=4", "rollout.n=2", "data.max_response_length=8")


STALE = ("pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout", "trainer.n_gpus_per_node=2")
"""Engines in a pool of their own, as rollout.staleness needs them."""


def ppo_config(*overrides: str) -> PpoConfig:
    config = compose("ppo", [*REQUIRED, *SMALL, *overrides])
    assert isinstance(config, PpoConfig)
    return config
