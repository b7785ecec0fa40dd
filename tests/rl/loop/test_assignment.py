from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpc_rl.errors import UserError
from hpc_rl.rl.loop.assignment import Assignment, Shard, assign_responses, mini_batches, shard_parcels, shuffled

MICRO_TOKENS = 60
lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=40)
sizes = st.none() | st.integers(1, 50)
ranks = st.integers(1, 5)


def assigned_to(
    pairs: list[tuple[int, int]], size: int | None, ranks: int, order: NDArray[np.int64] | None = None
) -> Assignment:
    """Pairs of the tokens that are only context, and those that the policy sampled."""
    context, sampled = np.array(pairs, np.int64).T
    return assign_responses(context + sampled, sampled, size, ranks, MICRO_TOKENS, order)


def split(assignment: Assignment, column: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Each rank's part as the rank opens it."""
    return [np.concatenate([column[:0], *parts]) for parts in assignment.split(column)]


def opened(assignment: Assignment, *rows: list[NDArray[Any]]) -> list[Shard]:
    return [own.open() for own in shard_parcels(assignment, *rows)]


@given(lengths, sizes, ranks)
def test_every_response_is_on_one_rank_within_the_budget(
    pairs: list[tuple[int, int]], size: int | None, ranks: int
) -> None:
    assignment = assigned_to(pairs, size, ranks)
    assert sorted(chain.from_iterable(order.tolist() for order in assignment.orders)) == list(range(len(pairs)))
    for plan, order in zip(assignment.micro_batches, assignment.orders, strict=True):
        assert [i for mini in plan for micro in mini for i in micro] == order.tolist()
        for micro in chain.from_iterable(plan):
            assert sum(sum(pairs[i]) for i in micro) <= MICRO_TOKENS


@given(lengths, sizes, ranks)
def test_mini_batches_are_the_same_for_any_number_of_ranks(
    pairs: list[tuple[int, int]], size: int | None, ranks: int
) -> None:
    assignment = assigned_to(pairs, size, ranks)
    expected = mini_batches(len(pairs), size)
    assert {len(plan) for plan in assignment.micro_batches} == {len(expected)}
    for number, part in enumerate(expected):
        assigned = [i for plan in assignment.micro_batches for micro in plan[number] for i in micro]
        assert sorted(assigned) == list(range(part.start, part.stop))
        # Each micro-batch is a round of collectives, which every rank has to join.
        assert len({len(plan[number]) for plan in assignment.micro_batches}) == 1


@given(lengths, sizes, ranks)
def test_ranks_have_equal_work_up_to_one_response_per_mini_batch(
    pairs: list[tuple[int, int]], size: int | None, ranks: int
) -> None:
    assignment = assigned_to(pairs, size, ranks)
    loads = [sum(sum(pairs[i]) for i in order.tolist()) for order in assignment.orders]
    longest = max(map(sum, pairs))
    assert max(loads) - min(loads) <= longest * len(mini_batches(len(pairs), size))


@given(lengths, sizes, ranks)
def test_columns_are_split_and_joined(pairs: list[tuple[int, int]], size: int | None, ranks: int) -> None:
    assignment = assigned_to(pairs, size, ranks)
    responses = [length for _, length in pairs]
    column = np.arange(sum(responses), dtype=np.float32)
    parts = split(assignment, column)
    np.testing.assert_array_equal(assignment.join(parts), column)
    of_response = np.split(column, np.cumsum(responses)[:-1])
    for part, order in zip(parts, assignment.orders, strict=True):
        assert part.tolist() == [value for i in order for value in of_response[i].tolist()]
    rows = np.arange(len(pairs), dtype=np.float32)
    np.testing.assert_array_equal(assignment.join_responses([rows[order] for order in assignment.orders]), rows)


@given(lengths, sizes, ranks)
def test_shards_hold_prompt_and_response_of_their_samples(
    pairs: list[tuple[int, int]], size: int | None, ranks: int
) -> None:
    assignment = assigned_to(pairs, size, ranks)
    prompts = [np.full(p, 1000 + i, np.int32) for i, (p, _) in enumerate(pairs)]
    responses = [np.full(r, 2000 + i, np.int32) for i, (_, r) in enumerate(pairs)]
    masks = [np.arange(r) % 3 != i % 2 for i, (_, r) in enumerate(pairs)]
    for shard, order in zip(opened(assignment, prompts, responses, masks), assignment.orders, strict=True):
        assert shard.response_mask is not None
        assert shard.response_mask.tolist() == [token for i in order for token in masks[i].tolist()]
        assert shard.response_mask.dtype == np.bool_
        assert sum(map(sum, shard.mini_batches)) == len(order)
        assert shard.tokens.dtype == np.int32
        at = 0
        for i, p, r in zip(order, shard.prompt_lengths, shard.response_lengths, strict=True):
            assert (p, r) == pairs[i]
            assert shard.tokens[at : at + p + r].tolist() == [1000 + i] * p + [2000 + i] * r
            at += p + r
        assert at == len(shard.tokens)
    assert all(shard.response_mask is None for shard in opened(assignment, prompts, responses))


@given(lengths, sizes, ranks, st.integers(0, 9))
def test_shuffled_mini_batches_are_the_same_for_any_number_of_ranks(
    pairs: list[tuple[int, int]], size: int | None, ranks: int, seed: int
) -> None:
    order = shuffled(len(pairs), seed, 3, 1)
    assignment = assigned_to(pairs, size, ranks, order)
    for number, part in enumerate(mini_batches(len(pairs), size)):
        assigned = [i for plan in assignment.micro_batches for micro in plan[number] for i in micro]
        assert sorted(assigned) == sorted(order[part].tolist())
    column = np.arange(sum(length for _, length in pairs), dtype=np.float32)
    np.testing.assert_array_equal(assignment.join(split(assignment, column)), column)


def test_the_order_depends_on_seed_step_and_epoch() -> None:
    orders = [shuffled(20, *key).tolist() for key in ((1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (1, 2, 3))]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders.pop() == orders[0] and len({tuple(order) for order in orders}) == 4


def test_a_last_mini_batch_may_be_smaller() -> None:
    assert mini_batches(10, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert mini_batches(10, None) == mini_batches(10, 20) == [slice(0, 10)]


def test_the_longest_row() -> None:
    lengths = np.array([20, 25, 30, 7, 5])
    assignment = assign_responses(lengths, lengths, 3, 2, MICRO_TOKENS)
    assert assignment.micro_batches == [[[[0, 1]], [[3]]], [[[2]], [[4]]]]
    assert assignment.longest_row(lengths) == 45
    few = assign_responses(lengths[2:3], lengths[2:3], None, 2, MICRO_TOKENS)  # a rank without a row
    assert few.longest_row(lengths[2:3]) == 30


def test_a_sample_over_the_budget_is_refused() -> None:
    with pytest.raises(UserError, match=r"a sample of 61 tokens is over trainer\.micro_tokens 60"):
        assigned_to([(31, 30)], None, 1)


@given(lengths, sizes, ranks, st.integers(1, 4))
def test_ranks_that_share_rows_have_the_same_responses(
    pairs: list[tuple[int, int]], size: int | None, groups: int, copies: int
) -> None:
    """Each sequence group has what one rank of as many ranks as there are groups has."""
    context, sampled = np.array(pairs, np.int64).T
    plain = assigned_to(pairs, size, groups)
    assignment = assign_responses(context + sampled, sampled, size, groups * copies, MICRO_TOKENS, None, copies)
    assert assignment.sizes == [one for one in plain.sizes for _ in range(copies)]
    assert [order.tolist() for order in assignment.orders] == [o.tolist() for o in plain.orders for _ in range(copies)]
    assert assignment.responses == plain.responses == len(pairs)
    column = np.arange(sum(sampled), dtype=np.float32)
    parts = split(assignment, column)
    for mine, theirs in zip(assignment.once(parts), split(plain, column), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(assignment.join(parts), column)
    rows = np.arange(len(pairs), dtype=np.float32)
    np.testing.assert_array_equal(assignment.join_responses([rows[order] for order in assignment.orders]), rows)
    prompts, responses = ([np.full(n, i, np.int32) for i, n in enumerate(found)] for found in (context, sampled))
    found = shard_parcels(assignment, prompts, responses)
    assert len(found) == groups * copies
    assert all(found[rank] is found[rank - rank % copies] for rank in range(len(found)))
