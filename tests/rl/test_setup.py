from __future__ import annotations

import pytest

from hpc_rl.rl import setup
from tests.rl.ppo_config import STALE, ppo_config

TWO_UPDATES = "actor.ppo_epochs=2"
IN_REWARD = "algorithm.kl.where=reward"


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ((), "skip"),
        (("algorithm.kl={where: loss, estimator: k3}",), "skip"),
        ((TWO_UPDATES,), "rollout"),
        (("actor.mini_batch_size=4",), "rollout"),
        ((IN_REWARD,), "rollout"),
        ((TWO_UPDATES, "rollout.dtype=bfloat16"), "recompute"),
        ((TWO_UPDATES, "rollout.dtype=float32"), "rollout"),
        ((TWO_UPDATES, "model.dtype=bfloat16"), "recompute"),
        ((TWO_UPDATES, "rollout.name=vllm"), "recompute"),
        ((TWO_UPDATES, "trainer.device=cuda"), "recompute"),
        ((TWO_UPDATES, "trainer.device=cuda", "rollout.name=hf", "rollout.dtype=float32"), "recompute"),
        (("rollout.calculate_log_probs=true",), "recompute"),
        (("algorithm.tis_cap=2",), "recompute"),
        (("teacher.path=/teacher",), "rollout"),
        ((*STALE, "rollout.staleness=1"), "rollout"),
        ((*STALE, "rollout.staleness=1", "rollout.dtype=bfloat16"), "rollout"),
        ((*STALE, "rollout.staleness=4", "algorithm.tis_cap=2"), "recompute"),
    ],
)
def test_old_logprobs_are_computed_where_the_algorithm_needs_them(overrides: tuple[str, ...], expected: str) -> None:
    assert setup.old_logprobs(ppo_config(*overrides)) == expected


@pytest.mark.parametrize(
    "overrides, updates", [((), 1), ((TWO_UPDATES,), 2), (("actor.mini_batch_size=2", TWO_UPDATES), 8)]
)
def test_updates_of_a_step(overrides: tuple[str, ...], updates: int) -> None:
    assert setup.updates_per_step(ppo_config(*overrides)) == updates


def test_the_arithmetic_of_a_step_is_told() -> None:
    large = ("data.train_batch_size=256", "rollout.n=8", "actor.mini_batch_size=512", "actor.ppo_epochs=2")
    assert setup.describe_step(ppo_config(*large)) == (
        "each step: 256 prompts x 8 = 2,048 responses = 4 mini-batches of 512, x 2 epochs = 8 updates; "
        "micro-batches of at most 4,096 tokens"
    )
    assert setup.describe_step(ppo_config()) == (
        "each step: 4 prompts x 2 = 8 responses = 1 mini-batch, x 1 epoch = 1 update; "
        "micro-batches of at most 4,096 tokens"
    )
