from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from hpc_rl.config.rl.ppo import ActorConfig
from hpc_rl.rl.loop import experience as columns
from hpc_rl.rl.loop.assignment import mini_batches
from hpc_rl.rl.rollout.engine import Completion
from tests.rl.ppo_config import ppo_config

all_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=8)


def experience_of(responses: list[int], prompts: list[int] | None = None) -> TensorDict:
    """Token n of all has the log-probability -n."""
    prompts = prompts or [2] * len(responses)
    starts = np.cumsum([0, *responses[:-1]])
    completions = [
        Completion(
            np.arange(start, start + length, dtype=np.int32),
            -np.arange(start, start + length, dtype=np.float32),
            finished=length < 6,
        )
        for start, length in zip(starts, responses, strict=True)
    ]
    asked = [np.full(length, 7, np.int32) for length in prompts]
    return columns.new_experience(asked, range(len(responses)), completions)


@given(all_lengths)
def test_flat_columns_are_jagged_again(lengths: list[int]) -> None:
    experience = experience_of(lengths)
    values_N = torch.arange(sum(lengths), dtype=torch.float32)
    experience["values"] = columns.jagged(values_N, columns.lengths(experience))
    assert [row.tolist() for row in experience["values"].unbind()] == [
        part.tolist() for part in values_N.split(lengths)
    ]
    assert torch.equal(columns.flat(experience, "values"), values_N)


@given(all_lengths)
def test_a_number_per_response_at_each_of_its_tokens(lengths: list[int]) -> None:
    experience = experience_of(lengths)
    column = columns.repeat(torch.arange(len(lengths)).float(), experience)
    assert column.values().tolist() == [i for i, length in enumerate(lengths) for _ in range(length)]


def test_sums_and_tokens_of_some_responses() -> None:
    experience = experience_of([2, 1, 3])
    assert columns.sums(experience, "rollout_logprobs").tolist() == [-1, -2, -12]
    values_N = columns.flat(experience, "rollout_logprobs")
    chosen_B = torch.tensor([True, False, True])
    assert columns.of_responses(values_N, chosen_B, experience).tolist() == [0, -1, -3, -4, -5]
    assert columns.with_zeros(torch.arange(5.0), chosen_B, experience).tolist() == [0, 1, 0, 2, 3, 4]
    everyone_B = torch.ones(3, dtype=torch.bool)
    assert columns.of_responses(values_N, everyone_B, experience) is values_N
    assert columns.with_zeros(values_N, everyone_B, experience) is values_N
    assert [row.tolist() for row in columns.rows_of(experience["response_ids"])] == [[0, 1], [2], [3, 4, 5]]


def test_what_a_new_experience_has() -> None:
    experience = experience_of([3, 6], prompts=[4, 1])
    assert set(experience.keys()) == {"prompt_ids", "response_ids", "rollout_logprobs", "group", "finished"}
    assert experience.batch_size == torch.Size([2])
    assert columns.lengths(experience).tolist() == [3, 6]
    assert columns.lengths(experience, "prompt_ids").tolist() == [4, 1]
    assert experience["finished"].tolist() == [True, False]
    assert [row.tolist() for row in experience["response_ids"].unbind()] == [[0, 1, 2], [3, 4, 5, 6, 7, 8]]
    assert {name: str(experience[name].dtype) for name in experience.keys()} == {  # noqa: SIM118 - iterating gives rows
        "prompt_ids": "torch.int32",
        "response_ids": "torch.int32",
        "rollout_logprobs": "torch.float32",
        "group": "torch.int64",
        "finished": "torch.bool",
    }


PLAIN = ppo_config()
LENGTHS = [3, 1, 6, 2]


def scored(lengths: list[int], *overrides: str) -> TensorDict:
    """Responses with the scores 0, 1, 2, ..."""
    experience = experience_of(lengths)
    columns.add_scores(experience, torch.arange(len(lengths)).float(), ppo_config(*overrides))
    return experience


def without_scores(lengths: list[int], missing: list[int], *overrides: str) -> TensorDict:
    """Responses with the scores 0, 1, 2, ..., but some could not be scored."""
    experience, scores = experience_of(lengths), torch.arange(len(lengths)).float()
    scores[missing] = torch.nan
    columns.add_scores(experience, scores, ppo_config(*overrides))
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


def test_a_response_without_a_score_teaches_nothing_and_changes_nothing() -> None:
    """As if it were not there: advantages, returns and weights of the others."""
    config = ppo_config("actor.mini_batch_size=4")
    everyone, others = without_scores([3, 1, 6, 2], [2]), scored([3, 1, 2])
    assert everyone["scored"].tolist() == [True, True, False, True] and everyone["scores"].tolist() == [0, 1, 0, 3]
    others["scores"] = torch.tensor([0.0, 1.0, 3.0])
    for experience in (everyone, others):
        experience["values"] = column_of(experience, 0.5)
        columns.add_rewards(experience, config.algorithm, 0.0)
        columns.add_advantages(experience, config.algorithm, None)
        experience["weights"] = columns.loss_weights(experience, config, "token-mean")
    for name in ("advantages", "returns", "weights"):
        rows = [row.tolist() for row in everyone[name].unbind()]
        assert rows.pop(2) == [0.0] * 6
        assert rows == [pytest.approx(row.tolist()) for row in others[name].unbind()]


def test_a_missing_baseline_is_a_missing_score() -> None:
    experience, greedy = experience_of([1, 1]), torch.tensor([torch.nan, 0.25])
    columns.add_scores(experience, torch.tensor([0.0, 1.0]), PLAIN, greedy)
    columns.add_rewards(experience, PLAIN.algorithm, 0.0)
    columns.add_advantages(experience, ppo_config("algorithm.advantage=remax").algorithm, greedy)
    assert columns.flat(experience, "advantages").tolist() == [0.0, 0.75]
    assert experience["scored"].tolist() == [False, True]


def test_truncated_responses_can_be_left_out_of_the_loss() -> None:
    experience, config = scored([6, 2]), ppo_config("algorithm.mask_truncated=true")
    for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        first, second = columns.loss_weights(experience, config, aggregation).unbind()
        assert first.tolist() == [0.0] * 6
        assert second.tolist() == ([1.0, 1.0] if aggregation == "seq-mean-token-sum" else [0.5, 0.5])


def test_weights_follow_the_order_that_is_cut_into_mini_batches() -> None:
    experience, config = scored([1, 2, 3, 6]), ppo_config("actor.mini_batch_size=2")
    weights = columns.loss_weights(experience, config, "token-mean", np.array([3, 0, 1, 2]))
    per_token = [row[0].item() for row in weights.unbind()]
    assert per_token == pytest.approx([1 / 7, 1 / 5, 1 / 5, 1 / 7])


def test_a_mini_batch_that_teaches_nothing_has_no_weight() -> None:
    weights = columns.loss_weights(without_scores([2, 2], [0, 1]), PLAIN, "token-mean")
    assert weights.values().tolist() == [0.0] * 4


def test_the_score_is_the_last_tokens_reward() -> None:
    experience = scored(LENGTHS)
    assert columns.add_rewards(experience, ppo_config().algorithm, 0.5) is None
    assert [row.tolist() for row in experience["rewards"].unbind()] == [[0, 0, 0], [1], [0, 0, 0, 0, 0, 2], [0, 3]]


def test_kl_in_the_reward_lowers_it_token_by_token() -> None:
    experience = scored(LENGTHS)
    experience["old_logprobs"] = column_of(experience, -1.0)
    experience["ref_logprobs"] = column_of(experience, -1.25)
    algorithm = ppo_config("algorithm.kl.where=reward").algorithm
    divergence = columns.add_rewards(experience, algorithm, 2.0)
    assert divergence == pytest.approx(0.25 * sum(LENGTHS) / len(LENGTHS))
    assert [row.tolist() for row in experience["rewards"].unbind()] == [
        [-0.5, -0.5, -0.5], [0.5], [-0.5, -0.5, -0.5, -0.5, -0.5, 1.5], [-0.5, 2.5]
    ]  # fmt: skip


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.none() | st.integers(1, 8),
    st.sampled_from(["token-mean", "seq-mean-token-mean"]),
)
def test_weights_sum_to_one_over_each_mini_batch(lengths: list[int], size: int | None, mode: str) -> None:
    experience = scored(lengths)
    config = PLAIN.model_copy(update={"actor": ActorConfig(mini_batch_size=size)})
    rows = columns.loss_weights(experience, config, mode).unbind()
    for part in mini_batches(len(lengths), size):
        assert sum(float(row.sum()) for row in rows[part]) == pytest.approx(1)


def test_dr_grpos_weights_do_not_depend_on_lengths() -> None:
    experience = scored(LENGTHS)
    weights = columns.loss_weights(experience, ppo_config(), "seq-mean-token-sum-norm")
    assert set(weights.values().tolist()) == {1 / (4 * 8)}  # responses x data.max_response_length


def test_importance_weights_are_capped() -> None:
    experience = experience_of([2, 1])
    experience["old_logprobs"] = columns.jagged(
        columns.flat(experience, "rollout_logprobs") + torch.tensor([0.0, 5.0, -1.0]), columns.lengths(experience)
    )
    weights = columns.importance_weights(experience, ppo_config("algorithm.tis_cap=2").algorithm)
    assert [row.tolist() for row in weights.unbind()] == [[1.0, 2.0], [pytest.approx(0.3678794)]]


def test_advantages_of_a_group_are_at_every_token() -> None:
    experience = scored(LENGTHS)
    experience["group"] = torch.tensor([0, 0, 1, 1])
    algorithm = ppo_config("algorithm.advantage=dr_grpo").algorithm
    columns.add_rewards(experience, algorithm, 0.0)
    columns.add_advantages(experience, algorithm, None)
    assert [row.tolist() for row in experience["advantages"].unbind()] == [
        [-0.5] * 3, [0.5], [-0.5] * 6, [0.5] * 2
    ]  # fmt: skip
    assert "returns" not in experience


def test_a_teacher_gives_each_token_its_log_ratio_alone_or_added() -> None:
    for advantage, added in (("opd", [0.0] * 4), ("dr_grpo", [-0.5, 0.5, -0.5, 0.5])):
        experience = scored(LENGTHS)
        experience["group"] = torch.tensor([0, 0, 1, 1])
        experience["old_logprobs"] = column_of(experience, -1.0)
        experience["teacher_logprobs"] = columns.repeat(torch.tensor([-1.0, -0.5, -1.25, -2.0]), experience)
        algorithm = ppo_config(f"algorithm.advantage={advantage}", "teacher.path=/teacher").algorithm
        columns.add_rewards(experience, algorithm, 0.0)
        columns.add_advantages(experience, algorithm, None, 2.0)
        assert [row.tolist() for row in experience["advantages"].unbind()] == [
            [own + reward] * length for own, reward, length in zip([0.0, 1.0, -0.5, -2.0], added, LENGTHS, strict=True)
        ]


def test_gae_gives_the_critic_its_returns() -> None:
    experience = scored(LENGTHS)
    experience["values"] = column_of(experience, 0.0)
    algorithm = ppo_config("algorithm.lam=1").algorithm
    columns.add_rewards(experience, algorithm, 0.0)
    columns.add_advantages(experience, algorithm, None)
    assert [row.tolist() for row in experience["returns"].unbind()] == [[0] * 3, [1], [2] * 6, [3] * 2]
    assert float(columns.flat(experience, "advantages").mean()) == pytest.approx(0, abs=1e-6)
