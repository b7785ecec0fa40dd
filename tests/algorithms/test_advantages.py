from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.algorithms import advantages
from tests.algorithms import reference
from tests.algorithms.batches import Rows, flat, grouped, lengths, lengths_of, numbers, rows


def close(got: torch.Tensor, wanted: Rows | list[float], atol: float = 1e-4) -> None:
    expected = flat(wanted) if wanted and isinstance(wanted[0], list) else torch.tensor(wanted)
    torch.testing.assert_close(got, expected.float(), atol=atol, rtol=1e-4)


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5, so errors count 1, 1/4, 1/16; the value after the last token is 0.
    # first:  errors 0 + 0.5*2 - 1 = 0,  0 + 0.5*4 - 2 = 0,  3 - 4 = -1
    #         advantages -1/16, -1/4, -1;  returns 1 - 1/16, 2 - 1/4, 4 - 1
    # second: error 1 - 0.5 = 0.5;         return 1
    rewards, values = torch.tensor([0.0, 0.0, 3.0, 1.0]), torch.tensor([1.0, 2.0, 4.0, 0.5])
    got, returns = advantages.gae(rewards, values, torch.tensor([3, 1]), gamma=0.5, lam=0.5)
    assert got.tolist() == [-0.0625, -0.25, -1.0, 0.5]
    assert returns.tolist() == [0.9375, 1.75, 3.0, 1.0]


@given(st.data(), lengths, st.floats(0.1, 1), st.floats(0, 1))
def test_gae_equals_its_definition(data: st.DataObject, lengths: list[int], gamma: float, lam: float) -> None:
    rewards, values = data.draw(rows(numbers, lengths)), data.draw(rows(numbers, lengths))
    rewards_N, values_N = flat(rewards), flat(values)
    before = rewards_N.clone(), values_N.clone()
    got, returns = advantages.gae(rewards_N, values_N, lengths_of(rewards), gamma, lam)
    expected, expected_returns = reference.gae(rewards, values, gamma, lam)
    close(got, expected)
    close(returns, expected_returns)
    assert torch.equal(rewards_N, before[0]) and torch.equal(values_N, before[1])


def test_whiten_by_hand() -> None:
    # 1, 3, 5 and 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    values = torch.tensor([1.0, 3.0, 5.0, 7.0])
    root = math.sqrt(5)
    torch.testing.assert_close(advantages.whiten(values), torch.tensor([-3 / root, -1 / root, 1 / root, 3 / root]))
    assert values.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert advantages.whiten(torch.empty(0)).tolist() == []


def test_whitening_equal_values_gives_exactly_zero() -> None:
    assert advantages.whiten(torch.full((21,), 1000.1)).eq(0).all()


@given(st.data(), lengths)
def test_whitened_tokens_have_mean_0_and_variance_1(data: st.DataObject, lengths: list[int]) -> None:
    values = data.draw(rows(st.sampled_from([-2.0, 0.5, 1.0, 3.0]), lengths))
    got = advantages.whiten(flat(values))
    close(got, reference.whiten(values))
    if len({number for row in values for number in row}) > 1:
        assert got.mean().item() == pytest.approx(0, abs=1e-5)
        assert got.var(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_groups_by_hand() -> None:
    # Prompt 7: scores 1, 0, 0, 1, mean 1/2, sample variance (4 * 1/4) / 3 = 1/3.  Prompt 3: scores 2, 5, mean 7/2,
    # sample variance (9/4 + 9/4) / 1 = 9/2.
    scores = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0, 1.0])
    groups = torch.tensor([7, 3, 7, 7, 3, 7])
    half, root = 0.5 / math.sqrt(1 / 3), 1.5 / math.sqrt(4.5)
    close(advantages.grpo(scores, groups), [half, -root, -half, -half, root, half], atol=1e-5)
    close(advantages.dr_grpo(scores, groups), [0.5, -1.5, -0.5, -0.5, 1.5, 0.5], atol=1e-6)
    # 1 - (0 + 0 + 1) / 3 = 2/3;  0 - (1 + 0 + 1) / 3 = -2/3;  2 - 5 = -3
    close(advantages.rloo(scores, groups), [2 / 3, -3, -2 / 3, -2 / 3, 3, 2 / 3], atol=1e-6)


@given(grouped())
def test_grpo_equals_its_definition(batch: tuple[list[float], list[int]]) -> None:
    scores, groups = batch
    got = advantages.grpo(torch.tensor(scores), torch.tensor(groups))
    # The lists hold float64 numbers, of which the tensor has the float32 neighbours.
    exact = torch.tensor(scores).tolist()
    close(got, reference.grpo(exact, groups))
    close(advantages.dr_grpo(torch.tensor(scores), torch.tensor(groups)), reference.dr_grpo(exact, groups))
    assert advantages.informative_groups(torch.tensor(scores), torch.tensor(groups)).tolist() == reference.informative(
        exact, groups
    )


@given(grouped(smallest=2))
def test_rloo_equals_its_definition(batch: tuple[list[float], list[int]]) -> None:
    scores, groups = batch
    close(advantages.rloo(torch.tensor(scores), torch.tensor(groups)), reference.rloo(scores, groups))


def test_a_group_of_one_or_of_equal_scores() -> None:
    assert advantages.grpo(torch.tensor([5.0]), torch.tensor([0])).tolist() == [0.0]
    for size in range(2, 20):
        equal = torch.full((size,), 0.1)
        assert advantages.grpo(equal, torch.zeros(size, dtype=torch.int64)).tolist() == [0.0] * size
    assert advantages.rloo(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1])).tolist() == [-1.0, 1.0, 0.0]


def test_grpo_divides_by_the_deviation_of_the_group_of_the_batch_or_not() -> None:
    # Means 2 and 12; deviations of the groups sqrt(2) and sqrt(8), of all four scores sqrt(106 / 3).
    scores, groups = torch.tensor([1.0, 3.0, 10.0, 14.0]), torch.tensor([0, 0, 1, 1])
    close(advantages.grpo(scores, groups), [-(0.5**0.5), 0.5**0.5, -(0.5**0.5), 0.5**0.5])
    assert advantages.grpo(scores, groups, "none").tolist() == [-1.0, 1.0, -2.0, 2.0]
    deviation = (110 / 3) ** 0.5
    close(advantages.grpo(scores, groups, "batch"), [-1 / deviation, 1 / deviation, -2 / deviation, 2 / deviation])
    assert advantages.grpo(torch.tensor([5.0]), torch.tensor([0]), "batch").tolist() == [0.0]


def test_informative_groups() -> None:
    scores, groups = torch.tensor([0.0, 1.0, -2.0, -2.0, 4.0, 0.0]), torch.tensor([5, 2, 9, 9, 2, 1])
    assert advantages.informative_groups(scores, groups).tolist() == [False, True, False, False, True, False]


def test_missing_scores_do_not_make_a_group_informative() -> None:
    scores = torch.tensor([1.0, math.nan, 1.0, math.nan, math.nan, 2.0, math.nan, 3.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    assert advantages.informative_groups(scores, groups).tolist() == [False] * 5 + [True] * 3


def test_remax_by_hand() -> None:
    # The first token is followed by a reward of 1.5, of which it caused all; the second one only caused 2.
    rewards = torch.tensor([-0.5, 2.0, 0.25, 0.0, 0.0])
    got = advantages.remax(rewards, torch.tensor([2, 3]), torch.tensor([0.5, 1.0]))
    assert got.tolist() == [1.0, 1.5, -0.75, -1.0, -1.0]


def test_whitening_does_not_amplify_noise() -> None:
    # A deviation of 1e-5 is small compared to the floor of 1e-4.
    close(advantages.whiten(torch.tensor([1e-5, -1e-5])), [0.0995, -0.0995])


def test_reinforce_pp_by_hand() -> None:
    # gamma 1/2: 0 + (2 + 4/2) / 2 = 2, 2 + 4/2 = 4, 4; and 2. Mean 3, deviation 1.
    got = advantages.reinforce_pp(torch.tensor([0.0, 2.0, 4.0, 2.0]), torch.tensor([3, 1]), gamma=0.5)
    torch.testing.assert_close(got, torch.tensor([-1.0, 1.0, 1.0, -1.0]))


@given(st.data(), lengths, st.floats(0.1, 1))
def test_reinforce_pp_equals_its_definition(data: st.DataObject, lengths: list[int], gamma: float) -> None:
    rewards = data.draw(rows(st.sampled_from([0.0, 1.0, -0.5]), lengths))
    got = advantages.reinforce_pp(flat(rewards), lengths_of(rewards), gamma)
    to_come = reference.rewards_to_come(rewards, gamma)
    spread = max(map(max, to_come)) - min(map(min, to_come))
    if spread > 1e-3 or spread == 0:  # between, float32 rounding is what would be whitened
        close(got, reference.whiten(to_come), atol=2e-3)


@given(grouped(), st.data())
def test_reinforce_pp_baseline_equals_its_definition(batch: tuple[list[float], list[int]], data: st.DataObject) -> None:
    groups = batch[1]
    scores = [float(data.draw(st.integers(-2, 2))) for _ in groups]
    tokens = [[0.0] * data.draw(st.integers(1, 4)) for _ in groups]
    got = advantages.reinforce_pp_baseline(torch.tensor(scores), torch.tensor(groups), lengths_of(tokens))
    centred = torch.tensor(reference.dr_grpo(scores, groups)).tolist()
    close(got, reference.whiten([[number] * len(row) for number, row in zip(centred, tokens, strict=True)]))


def test_from_responses_to_tokens() -> None:
    lengths_B, scores = torch.tensor([2, 3, 1]), torch.tensor([2.0, -1.0, 0.5])
    assert advantages.to_tokens(scores, lengths_B).tolist() == [2.0, 2.0, -1.0, -1.0, -1.0, 0.5]
    assert advantages.token_rewards(scores, lengths_B).tolist() == [0.0, 2.0, 0.0, 0.0, -1.0, 0.5]
    assert advantages.total_of_each(torch.arange(6.0), lengths_B).tolist() == [1.0, 9.0, 5.0]
    assert advantages.total_of_each(torch.empty(0), torch.empty(0, dtype=torch.int64)).tolist() == []


def test_overlong_penalty_by_hand() -> None:
    # Limit 10, buffer 4: free up to 6 tokens, then a quarter of the penalty 2 for each.
    got = advantages.overlong_penalty(torch.tensor([1, 6, 7, 8, 10, 12]), max_length=10, buffer=4, penalty=2.0)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]
    assert advantages.overlong_penalty(torch.tensor([9, 10]), 10, buffer=0, penalty=2.0).tolist() == [0.0, 0.0]


@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 30), st.integers(1, 30), st.floats(0, 3))
def test_overlong_penalty_equals_its_definition(
    lengths: list[int], max_length: int, buffer: int, penalty: float
) -> None:
    got = advantages.overlong_penalty(torch.tensor(lengths), max_length, buffer, penalty)
    close(got, [reference.overlong(length, max_length, buffer, penalty) for length in lengths], atol=1e-5)
