"""The benchmark of tokenized data, with a few rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import data_cache


@pytest.mark.slow
def test_a_small_run_measures_each_way(tmp_path: Path) -> None:
    found = data_cache.measure(tmp_path, rows=600, ranks=2)
    assert list(found) == [data_cache.FIRST, data_cache.LATER, data_cache.MAP]
    assert all(one["seconds"] > 0 for one in found.values())
    assert [set(one) for one in found.values()] == [{"seconds", "own", "files"}] * 2 + [{"seconds"}]
    assert len(list((tmp_path / "runs" / f".tokenized-{os.getuid()}").glob("[!.]*/*.arrow"))) == 2
