"""Plans of micro-batches: what must hold for every list of lengths, and comparisons with plain reference code."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.errors import UserError
from hpc_rl.training.batching import assign_bins, pack, plan_batch

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=60)


def load(samples: list[int], lengths: list[int]) -> int:
    return sum(lengths[sample] for sample in samples)


@given(LENGTHS, st.integers(1, 9), st.integers(64, 256), st.booleans())
def test_every_sample_is_planned_once_within_the_budget(
    lengths: list[int], ranks: int, budget: int, packing: bool
) -> None:
    plan = plan_batch(lengths, ranks, budget, packing)
    assert sorted(sample for rank in plan for micro in rank for sample in micro) == list(range(len(lengths)))
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1
    for rank in plan:
        for micro in rank:
            assert load(micro, lengths) <= budget
            assert packing or len(micro) <= 1
    assert plan == plan_batch(lengths, ranks, budget, packing)


@given(LENGTHS, st.integers(1, 9), st.integers(64, 256), st.booleans())
def test_ranks_have_equal_loads_up_to_one_sample(lengths: list[int], ranks: int, budget: int, packing: bool) -> None:
    plan = plan_batch(lengths, ranks, budget, packing)
    loads = [sum(load(micro, lengths) for micro in rank) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths)


@given(LENGTHS, st.integers(1, 9), st.integers(64, 256))
def test_a_micro_batch_is_empty_only_for_lack_of_samples(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_batch(lengths, ranks, budget)
    empty = sum(not micro for rank in plan for micro in rank)
    assert empty == max(0, ranks * len(plan[0]) - len(lengths))


def packed_plainly(lengths: list[int], multiple: int, budget: int) -> list[list[int]]:
    """The longest sample first, each into the emptiest bin, with as few bins as this way of filling allows."""
    order = sorted(range(len(lengths)), key=lambda sample: lengths[sample], reverse=True)
    count = 0
    while True:
        count += multiple
        bins: list[list[int]] = [[] for _ in range(count)]
        for sample in order:
            min(bins, key=lambda samples: load(samples, lengths)).append(sample)
        if all(load(samples, lengths) <= budget for samples in bins):
            return [sorted(samples) for samples in bins]


@given(LENGTHS, st.integers(1, 4), st.integers(64, 256))
def test_packing_is_the_plain_algorithm(lengths: list[int], multiple: int, budget: int) -> None:
    assert pack(lengths, multiple, budget) == packed_plainly(lengths, multiple, budget)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_bin_is_within_grahams_bound_of_the_best(lengths: list[int], bins: int) -> None:
    """Graham 1969, theorem for decreasing lengths: (4/3 - 1/3m) times the best possible."""
    best = min(
        max(sum(length for length, place in zip(lengths, places, strict=True) if place == bin) for bin in range(bins))
        for places in product(range(bins), repeat=len(lengths))
    )
    found = max(load(samples, lengths) for samples in pack(lengths, bins, 10**6))
    assert found <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(1, 6))
def test_a_round_assigns_neighbours_in_size(lengths: list[int], ranks: int) -> None:
    plan = assign_bins([[sample] for sample in range(len(lengths))], lengths, ranks)
    rounds = [[load(rank[number], lengths) for rank in plan] for number in range(len(plan[0]))]
    assert len(rounds) == -(-len(lengths) // ranks)
    for earlier, later in pairwise(rounds):
        assert min(earlier) >= max(later)


@pytest.mark.parametrize(
    ("loads", "ranks", "plan"),
    [
        ([6, 5, 4, 3, 2, 1], 2, [[[0], [3], [4]], [[1], [2], [5]]]),
        ([1, 2, 3, 4, 5, 6], 3, [[[5], [0]], [[4], [1]], [[3], [2]]]),
        ([5, 5, 5], 2, [[[0], []], [[1], [2]]]),
        ([7], 3, [[[0]], [[]], [[]]]),
        ([3, 2, 1], 1, [[[0], [1], [2]]]),
    ],
    ids=["rounds alternate", "fullest first", "ties by index, empty bins last", "more ranks than bins", "one rank"],
)
def test_assigned_bins(loads: list[int], ranks: int, plan: list[list[list[int]]]) -> None:
    assert assign_bins([[sample] for sample in range(len(loads))], loads, ranks) == plan


def test_packing_fills_the_budget() -> None:
    assert len(plan_batch([32] * 64, 2, 256)[0]) == 4
    assert plan_batch([3, 3, 2], 1, 8) == [[[0, 1, 2]]]


def test_equal_lengths_stay_in_order() -> None:
    assert pack([5, 5, 5, 5], 2, 100) == [[0, 2], [1, 3]]


def test_a_sample_over_the_budget_is_refused() -> None:
    with pytest.raises(UserError, match=r"300 tokens is over trainer\.micro_tokens 256"):
        plan_batch([5, 300], 1, 256)
    assert plan_batch([5, 300], 1, 256, packing=False) == [[[1], [0]]]
    assert plan_batch([256], 1, 256) == [[[0]]]


def test_no_samples() -> None:
    assert plan_batch([], 2, 256) == [[[]], [[]]]
    assert plan_batch([], 2, 256, packing=False) == [[], []]
