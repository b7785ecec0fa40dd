from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.tracking.page.plot import (
    FEWEST_BINS,
    MOST_BINS,
    Bin,
    Plot,
    Series,
    as_script_data,
    binned,
    is_binned,
    plot_data,
)

values = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)
RAMP = [(float(step), float(step)) for step in range(1, 2001)]


@given(st.lists(st.tuples(st.integers(1, 10**6), values), min_size=1, max_size=60), st.integers(1, 30))
def test_bins_keep_extremes_and_the_mean(points: list[tuple[int, float]], most: int) -> None:
    points = sorted(points)
    bins = binned(points, most)
    assert len(bins) <= most
    assert min(one.low for one in bins) == min(value for _, value in points)
    assert max(one.high for one in bins) == max(value for _, value in points)
    rounding = 1e-12 * max(abs(value) for _, value in points)
    assert all(one.low - rounding <= one.mean <= one.high + rounding for one in bins)


def test_bins_are_equal_runs_of_points() -> None:
    assert binned([(1.0, 5.0), (2.0, 7.0)], 2) == [Bin(1.0, 5.0, 5.0, 5.0), Bin(2.0, 7.0, 7.0, 7.0)]
    assert binned([(1.0, 5.0), (2.0, 9.0), (3.0, 1.0)], 2) == [Bin(1.5, 5.0, 7.0, 9.0), Bin(3.0, 1.0, 1.0, 1.0)]


def test_columns_of_x_are_shared() -> None:
    pair = [Series("a", [(1, 2.0), (2, 3.0)]), Series("b", [(1, 4.0), (2, 5.0)])]
    other = Plot([Series("c", [(2, 1.0)])], x="hours")
    data = plot_data([Plot(pair, from_zero=True, marks=[1.5]), other])
    assert data["xs"] == [(1, 2), (2,)]
    first, second = data["plots"]
    assert [line["x"] for line in first["series"]] == [0, 0] and second["series"][0]["x"] == 1
    assert first["series"][1] == {"name": "b", "style": 1, "x": 0, "mean": [4, 5]}
    assert (first["zero"], first["marks"], first["x"], second["x"]) == (True, [1.5], "step", "hours")
    assert not is_binned([Plot(pair, marks=[1.5]), other], data)


def test_long_lines_have_bands_unless_they_are_many() -> None:
    for count, banded in ((1, True), (4, True), (5, False)):
        plot = Plot([Series(str(i), RAMP) for i in range(count)])
        data = plot_data([plot])
        lines = data["plots"][0]["series"]
        assert all(len(line["mean"]) == MOST_BINS and ("low" in line) == banded for line in lines)
        assert is_binned([plot], data)
    assert lines[0]["mean"][0] == 2.5  # of steps 1 to 4


def test_many_lines_share_the_page() -> None:
    for count, most in ((60, MOST_BINS), (120, 250), (5000, FEWEST_BINS)):
        data = plot_data([Plot([Series(str(i), RAMP) for i in range(count)])])
        assert len(data["plots"][0]["series"][0]["mean"]) <= most < 2 * len(data["plots"][0]["series"][0]["mean"])


def test_areas_have_no_bands() -> None:
    data = plot_data([Plot([Series("a", RAMP)], stacked=True)])
    assert "low" not in data["plots"][0]["series"][0] and data["plots"][0]["stacked"]


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "&lt;", "\u2028", "\ud800"])
def test_no_name_ends_the_script_element(text: str) -> None:
    encoded = as_script_data(plot_data([Plot([Series(text, [(1, 1.0)])])]))
    assert not set("<>&") & set(encoded) and encoded.isascii()
    assert json.loads(encoded)["plots"][0]["series"][0]["name"] == text


def test_numbers_are_short() -> None:
    assert as_script_data(plot_data([Plot([Series("a", [(1, 1 / 3), (2, 2.0)])])])).count("0.33333") == 1
    assert '"mean":[0.33333,2]' in as_script_data(plot_data([Plot([Series("a", [(1, 1 / 3), (2, 2.0)])])]))
