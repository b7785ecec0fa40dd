"""The order of samples if files have weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.data.mixture import Mixture
from hpc_rl.data.order import epoch_order
from hpc_rl.data.reading.shares import describe, shares, whole_batches
from hpc_rl.errors import UserError

SIZES = (3, 20, 7)
COUNTS = (12, 8, 10)
MIXTURE = Mixture(SIZES, COUNTS)
STARTS = (0, 3, 23)


def file_of(samples: np.ndarray) -> np.ndarray:
    return np.searchsorted(STARTS, samples, side="right") - 1


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.2, 1.0)), min_size=1, max_size=5))
def test_shares_are_in_proportion_and_fill_an_epoch(files: list[tuple[int, float]]) -> None:
    sizes, weights = zip(*files, strict=True)
    exact = np.array(weights) / sum(weights) * sum(sizes)
    if exact.min() < 1:
        return
    counts = shares({str(file): weight for file, weight in enumerate(weights)}, sum(sizes))
    assert sum(counts) == sum(sizes)
    assert (np.abs(np.array(counts) - exact) < 1).all()


def test_shares_of_known_files() -> None:
    assert shares({"a": 0.7, "b": 0.3}, 10_000) == [7000, 3000]
    assert shares({"a": 7, "b": 3}, 10_000) == [7000, 3000], "only ratios count"
    assert shares({"a": 0.24, "b": 0.36, "c": 0.4}, 10) == [2, 4, 4], "2.4, 3.6, 4.0"
    assert Mixture.of({"a": 10, "b": 90}, (10, 90), 100) == Mixture((10, 90), (10, 90)), "in proportion to the sizes"
    assert Mixture.of({"a": 1, "b": 1}, (10, 90), 60) == Mixture((10, 90), (30, 30)), "an epoch with fewer samples"
    assert describe(["a", "b"], [1000, 9000], [7000, 3000]) == (
        "7,000 samples of a (70.0%; each of its 1,000 is used 7 times); "
        "3,000 samples of b (30.0%; each of its 9,000 is used 0.333 times)"
    )


def test_samples_in_whole_batches() -> None:
    assert [whole_batches(samples, 4) for samples in (3, 4, 7, 8, 9)] == [0, 4, 4, 8, 8]


def test_a_file_without_a_sample_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"b has the weight 0\.001 of 1\.001, and an epoch of 20 samples would have none"
    ):
        shares({"a": 1, "b": 0.001}, 20)


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_have_the_shares_and_use_files_in_passes(shuffle: bool) -> None:
    epochs = [MIXTURE.order(5, epoch, shuffle) for epoch in range(6)]
    for order in epochs:
        assert np.bincount(file_of(order), minlength=3).tolist() == list(COUNTS)
    drawn = np.bincount(np.concatenate(epochs), minlength=sum(SIZES))
    for start, size, count in zip(STARTS, SIZES, COUNTS, strict=True):
        of_file = drawn[start : start + size]
        assert of_file.sum() == 6 * count and of_file.max() - of_file.min() <= 1, "none is used twice as often"


def test_without_shuffling_files_keep_their_order_and_alternate() -> None:
    mixture = Mixture((4, 4), (6, 2))
    assert mixture.order(0, 0, False).tolist() == [0, 1, 4, 2, 3, 0, 5, 1]
    assert mixture.order(0, 1, False).tolist() == [2, 3, 6, 0, 1, 2, 7, 3]


def test_orders_depend_on_seed_and_epoch_only() -> None:
    orders = [tuple(MIXTURE.order(seed, epoch, True)) for seed in (1, 2) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert orders[3] == tuple(MIXTURE.order(2, 1, True)) == tuple(epoch_order(30, 2, 1, True, MIXTURE))
    whole = np.sort(Mixture((50, 50), (50, 50)).order(3, 4, True))
    assert whole.tolist() == list(range(100)), "equal shares of equal files: each sample once"


def test_files_and_passes_are_shuffled_differently() -> None:
    """The order of the samples of one file, in the first and the second pass over it, and of another file."""
    mixture = Mixture((30, 30), (30, 30))
    found = []
    for epoch in (0, 1):
        place = np.argsort(np.random.default_rng([8, epoch]).permutation(60))  # undoes the order of the epoch
        drawn = mixture.order(8, epoch, True)[place]
        found += [tuple(drawn[:30]), tuple(drawn[30:] - 30)]
    assert len(set(found)) == 4 and all(sorted(one) == list(range(30)) for one in found)
