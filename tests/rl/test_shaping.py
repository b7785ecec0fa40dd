from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from hpc_rl.config.ppo import ActorConfig
from hpc_rl.rl import experience as columns
from hpc_rl.rl import shaping
from hpc_rl.rl.dealing import mini_batches
from tests.rl.ppo_config import ppo_config
from tests.rl.test_experience import experience_of

PLAIN = ppo_config()
LENGTHS = [3, 1, 6, 2]
no_deadline = settings(deadline=None)


def scored(lengths: list[int], *overrides: str) -> TensorDict:
    """Responses with the scores 0, 1, 2, ..."""
    experience = experience_of(lengths)
    shaping.add_scores(experience, torch.arange(len(lengths)).float(), ppo_config(*overrides))
    return experience


def column_of(experience: TensorDict, each: float) -> torch.Tensor:
    """The same number for every token."""
    return columns.repeat(torch.full((len(experience),), each), experience)


def test_the_penalty_for_overlong_responses() -> None:
    """Of at most 8 tokens, the last 4 cost more and more, up to 2."""
    overlong = ("algorithm.overlong_buffer=4", "algorithm.overlong_penalty=2")
    experience = scored([3, 4, 5, 6], *overlong)
    assert experience["scores"].tolist() == [0.0, 1.0, 2.0 - 0.5, 3.0 - 1.0]
    assert scored([3, 4, 5, 6])["scores"].tolist() == [0, 1, 2, 3]


def test_the_score_is_the_last_tokens_reward() -> None:
    experience = scored(LENGTHS)
    assert shaping.add_rewards(experience, ppo_config().algorithm, 0.5) is None
    assert [row.tolist() for row in experience["rewards"].unbind()] == [[0, 0, 0], [1], [0, 0, 0, 0, 0, 2], [0, 3]]


def test_kl_in_the_reward_lowers_it_token_by_token() -> None:
    experience = scored(LENGTHS)
    experience["old_logprobs"] = column_of(experience, -1.0)
    experience["ref_logprobs"] = column_of(experience, -1.25)
    algorithm = ppo_config("algorithm.kl.where=reward").algorithm
    divergence = shaping.add_rewards(experience, algorithm, 2.0)
    assert divergence == pytest.approx(0.25 * sum(LENGTHS) / len(LENGTHS))
    assert [row.tolist() for row in experience["rewards"].unbind()] == [
        [-0.5, -0.5, -0.5], [0.5], [-0.5, -0.5, -0.5, -0.5, -0.5, 1.5], [-0.5, 2.5]
    ]  # fmt: skip


@no_deadline
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.none() | st.integers(1, 8),
    st.sampled_from(["token-mean", "seq-mean-token-mean"]),
)
def test_weights_sum_to_one_over_each_mini_batch(lengths: list[int], size: int | None, mode: str) -> None:
    experience = experience_of(lengths)
    config = PLAIN.model_copy(update={"actor": ActorConfig(mini_batch_size=size)})
    rows = shaping.loss_weights(experience, config, mode).unbind()  # type: ignore[arg-type]
    for part in mini_batches(len(lengths), size):
        assert sum(float(row.sum()) for row in rows[part]) == pytest.approx(1)


def test_dr_grpos_weights_do_not_depend_on_lengths() -> None:
    experience = experience_of(LENGTHS)
    weights = shaping.loss_weights(experience, ppo_config(), "seq-mean-token-sum-norm")
    assert set(weights.values().tolist()) == {1 / (4 * 8)}  # responses x data.max_response_length


def test_importance_weights_are_capped() -> None:
    experience = experience_of([2, 1])
    experience["old_logprobs"] = columns.jagged(
        columns.flat(experience, "rollout_logprobs") + torch.tensor([0.0, 5.0, -1.0]), columns.lengths(experience)
    )
    weights = shaping.importance_weights(experience, cap=2.0)
    assert [row.tolist() for row in weights.unbind()] == [[1.0, 2.0], [pytest.approx(0.3678794)]]


def test_advantages_of_a_group_are_at_every_token() -> None:
    experience = scored(LENGTHS)
    experience["group"] = torch.tensor([0, 0, 1, 1])
    algorithm = ppo_config("algorithm.advantage=dr_grpo").algorithm
    shaping.add_rewards(experience, algorithm, 0.0)
    shaping.add_advantages(experience, algorithm, None)
    assert [row.tolist() for row in experience["advantages"].unbind()] == [
        [-0.5] * 3, [0.5], [-0.5] * 6, [0.5] * 2
    ]  # fmt: skip
    assert "returns" not in experience


def test_gae_gives_the_critic_its_returns() -> None:
    experience = scored(LENGTHS)
    experience["values"] = column_of(experience, 0.0)
    algorithm = ppo_config("algorithm.lam=1").algorithm
    shaping.add_rewards(experience, algorithm, 0.0)
    shaping.add_advantages(experience, algorithm, None)
    assert [row.tolist() for row in experience["returns"].unbind()] == [[0] * 3, [1], [2] * 6, [3] * 2]
    assert float(columns.flat(experience, "advantages").mean()) == pytest.approx(0, abs=1e-6)
