"""The benchmarks of tokenized data, with a few rows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import data_cache, prompt_cache


@pytest.mark.long
@pytest.mark.slow
def test_a_small_run_measures_each_way(tmp_path: Path) -> None:
    found = data_cache.measure(tmp_path, rows=600, ranks=2)
    assert list(found) == [data_cache.FIRST, data_cache.LATER, data_cache.MAP]
    assert all(one["seconds"] > 0 for one in found.values())
    assert [set(one) for one in found.values()] == [{"seconds", "own", "files"}] * 2 + [{"seconds"}]
    assert len(list((tmp_path / "runs" / f".tokenized-{os.getuid()}").glob("[!.]*/*.arrow"))) == 2


@pytest.mark.long
@pytest.mark.slow
def test_prompts_are_loaded_in_each_way(tmp_path: Path) -> None:
    data_cache.make_data(tmp_path, 600)
    for way in prompt_cache.WAYS:
        found = prompt_cache.measure(tmp_path, way)
        assert set(found) == {"seconds", "step", "own", "files"} and found["seconds"] > 0 and found["step"] > 0
    assert len(list((tmp_path / "runs" / f".tokenized-{os.getuid()}").glob("[!.]*/*.arrow"))) == 1
