from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.data.mixture import Mixture
from hpc_rl.data.order import Position, batches, epoch_order, steps_per_epoch

sizes = st.integers(1, 40)


@given(sizes, sizes, st.booleans(), st.integers(0, 5))
def test_every_sample_once_per_epoch(n: int, size: int, shuffle: bool, seed: int) -> None:
    steps = steps_per_epoch(n, size)
    two_epochs = list(islice(batches(n, size, seed=seed, shuffle=shuffle), 2 * steps))
    for epoch in (0, 1):
        seen = np.concatenate([batch for batch, _ in two_epochs[epoch * steps : (epoch + 1) * steps]])
        assert sorted(seen) == list(range(n))
    assert two_epochs[steps - 1][1] == Position(1, 0)


@given(sizes, sizes, st.integers(1, 60), st.sampled_from([None, Mixture((3, 20, 7), (12, 8, 10))]))
def test_going_on_from_a_saved_position(n: int, size: int, stop: int, mixture: Mixture | None) -> None:
    n = n if mixture is None else 30
    whole = list(islice(batches(n, size, seed=3, shuffle=True, mixture=mixture), stop + 5))
    rest = islice(batches(n, size, seed=3, shuffle=True, start=whole[stop - 1][1], mixture=mixture), 5)
    for (expected, position), (batch, resumed) in zip(whole[stop:], rest, strict=True):
        assert position == resumed
        np.testing.assert_array_equal(expected, batch)
    assert next(batches(n, n, seed=3, shuffle=True, mixture=mixture))[1] == Position(1, 0)


def test_orders_differ_by_epoch_and_seed() -> None:
    orders = [tuple(epoch_order(50, seed, epoch, True)) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert list(epoch_order(4, 1, 3, shuffle=False)) == [0, 1, 2, 3]


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        next(batches(0, 4, seed=0, shuffle=False))


def test_the_order_of_a_large_data_set_is_an_array() -> None:
    """It is the permutation of numpy's default generator, which resumed runs of earlier versions have too."""
    order = epoch_order(1_000_000, 7, 2, True)
    assert (order.dtype, order.nbytes) == (np.int64, 8_000_000)
    assert order[:5].tolist() == np.random.default_rng([7, 2]).permutation(1_000_000)[:5].tolist()
    batch, position = next(batches(1_000_000, 3, seed=7, shuffle=True, start=Position(2, 999_998)))
    assert batch.tolist() == order[-2:].tolist() and position == Position(3, 0)
    assert batch.base is not None, "a batch is a view of the order"
    assert epoch_order(1_000_000, 7, 2, False).dtype == np.int64
