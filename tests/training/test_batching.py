from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.errors import UserError
from hpc_rl.training.batching import pack, plan_batch

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 9), st.integers(64, 256), st.booleans())
def test_every_plan_is_fair(lengths: list[int], ranks: int, budget: int, packing: bool) -> None:
    plan = plan_batch(lengths, ranks, budget, packing)
    assert sorted(sample for rank in plan for micro in rank for sample in micro) == list(range(len(lengths)))
    assert len(plan) == ranks and len({len(rank) for rank in plan}) == 1
    for rank in plan:
        for micro in rank:
            assert sum(lengths[sample] for sample in micro) <= budget
            assert packing or len(micro) <= 1
    loads = [sum(lengths[sample] for micro in rank for sample in micro) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths)
    assert plan == plan_batch(lengths, ranks, budget, packing)


@given(LENGTHS, st.integers(1, 9), st.integers(64, 256))
def test_no_micro_batch_is_empty_without_need(lengths: list[int], ranks: int, budget: int) -> None:
    plan = plan_batch(lengths, ranks, budget)
    empty = sum(not micro for rank in plan for micro in rank)
    assert empty == max(0, ranks * len(plan[0]) - len(lengths))


@given(LENGTHS, st.integers(1, 4), st.integers(64, 256))
def test_micro_batches_of_one_round_are_alike(lengths: list[int], ranks: int, budget: int) -> None:
    bins = pack(lengths, ranks, budget)
    loads = [sum(lengths[sample] for sample in samples) for samples in bins]
    assert max(loads) - min(loads) <= max(lengths)


def test_packing_fills_the_budget() -> None:
    assert len(plan_batch([32] * 64, 2, 256)[0]) == 4


def test_a_sample_over_the_budget_is_refused() -> None:
    with pytest.raises(UserError, match=r"300 tokens is over trainer\.micro_tokens 256"):
        plan_batch([5, 300], 1, 256)
    assert plan_batch([5, 300], 1, 256, packing=False) == [[[1], [0]]]
