"""pass@k against all subsets, maj@k against its definition, and the bootstrap's interval."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.algorithms.evaluation import estimate, maj_at_k, majority_is_correct, pass_at_k, sizes


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_response(case: tuple[int, int, int]) -> None:
    n, correct, k = case
    subsets = list(combinations([i < correct for i in range(n)], k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_responses_does_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize("case", [(2, 1, 3), (2, 3, 1), (2, 1, 0), (2, -1, 1)])
def test_an_impossible_pass_at_k(case: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(*case)


@pytest.mark.parametrize(
    "answers, correct, expected",
    [
        (["1", "1", "2"], [True, True, False], 1.0),
        (["1", "2", "2"], [True, False, False], 0.0),
        (["1", "2"], [True, False], 0.5),
        ([None, None, "1"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
    ],
)
def test_the_most_frequent_answer_counts(answers: list[str | None], correct: list[bool], expected: float) -> None:
    assert majority_is_correct(answers, correct) == expected
    assert maj_at_k(answers, correct, len(answers), np.random.default_rng(0)) == expected


def test_maj_at_1_is_the_fraction_of_correct_responses() -> None:
    found = maj_at_k(["1", "2", "3", "1"], [True, False, False, True], 1, np.random.default_rng(0))
    assert found == pytest.approx(0.5, abs=0.15)
    again = maj_at_k(["1", "2", "3", "1"], [True, False, False, True], 1, np.random.default_rng(0))
    assert found == again
    with pytest.raises(ValueError, match="maj@5 of 4"):
        maj_at_k(["1"] * 4, [True] * 4, 5, np.random.default_rng(0))


def test_the_interval_is_that_of_the_normal_approximation_for_many_prompts() -> None:
    values = np.random.default_rng(1).random(2000) < 0.3
    found = estimate(values.astype(float).tolist(), np.random.default_rng(0))
    spread = 1.96 * np.sqrt(found.value * (1 - found.value) / len(values))
    assert found.value == values.mean() and found.prompts == 2000
    assert found.low == pytest.approx(found.value - spread, abs=0.003)
    assert found.high == pytest.approx(found.value + spread, abs=0.003)
    assert estimate([0.5] * 3, np.random.default_rng(0)) == estimate([0.5] * 3, np.random.default_rng(7))


@pytest.mark.parametrize("n, expected", [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_sizes(n: int, expected: list[int]) -> None:
    assert sizes(n) == expected
