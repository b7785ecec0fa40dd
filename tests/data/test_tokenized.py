"""Samples in Arrow files, and sequences that are not in memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from hpc_rl.data.lazy import Joined, joined_sizes, sizes_of
from hpc_rl.data.pairs import Preference
from hpc_rl.data.sample_files import CHATS, preferences
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.data.tokenized import Form, Writer

NUMBERS = itertools.count()


def sample(length: int, targets: int) -> Sample:
    ids = np.array([next(NUMBERS) for _ in range(length)], np.int32)
    return Sample(ids, np.arange(length) >= length - targets)


def write(path: Path, blocks: Sequence[Sequence[Any]], form: Form[Any]) -> list[int]:
    with path.open("wb") as file:
        writer = Writer(file, form)
        for block in blocks:
            writer.write(block)
        writer.close()
    return writer.kept


def same(found: Sample, expected: Sample) -> None:
    assert (found.input_ids.dtype, found.loss_mask.dtype) == (np.int32, np.bool_)
    np.testing.assert_array_equal(found.input_ids, expected.input_ids)
    np.testing.assert_array_equal(found.loss_mask, expected.loss_mask)


def test_blocks_are_dealt_to_the_files(tmp_path: Path) -> None:
    blocks = [[sample(3, 1), sample(2, 1)], [sample(4, 3)], [], [sample(1, 0)], [sample(5, 2), sample(2, 2)]]
    paths = [tmp_path / "0", tmp_path / "1"]
    kept = [write(path, blocks[part::2], CHATS) for part, path in enumerate(paths)]
    assert kept == [[2, 0, 2], [1, 1]]
    rows = CHATS.opened(paths, kept)
    flat = [one for block in blocks for one in block]
    assert len(rows) == 6
    for found in (list(rows), rows[:], [rows[np.int64(index)] for index in range(6)]):
        for one, expected in zip(found, flat, strict=True):
            same(one, expected)
    same(rows[-1], flat[-1])
    same(rows[-6], flat[0])
    assert [len(one.input_ids) for one in rows[1:4]] == [2, 4, 1]
    for index in (6, -7):
        with pytest.raises(IndexError):
            rows[index]
    lengths, targets = rows.sizes()
    assert lengths.tolist() == [[3], [2], [4], [1], [5], [2]] and targets.tolist() == [[1], [1], [3], [0], [2], [2]]


def test_preferences_have_all_samples_and_values(tmp_path: Path) -> None:
    items = [Preference((sample(3, 1), sample(4, 2)), (0.5, -1.0, 1e-9)), Preference((sample(2, 1),) * 2, (0.0,) * 3)]
    form = preferences(2, 3)
    rows = form.opened([tmp_path / "0"], [write(tmp_path / "0", [items], form)])
    for found, expected in zip(rows, items, strict=True):
        assert isinstance(found, Preference) and found.values == expected.values
        for one, other in zip(found.samples, expected.samples, strict=True):
            same(one, other)
    assert rows.sizes()[0].tolist() == [[3, 4], [2, 2]] and rows.sizes()[1].tolist() == [[1, 2], [1, 1]]


def test_no_rows(tmp_path: Path) -> None:
    rows = CHATS.opened([tmp_path / "0"], [write(tmp_path / "0", [], CHATS)])
    assert len(rows) == 0 and list(rows) == [] and rows.sizes()[0].shape == (0, 1)


def test_tokens_are_views_of_the_file(tmp_path: Path) -> None:
    kept = [write(tmp_path / "0", [[sample(50_000, 1)] * 4] * 20, CHATS)]
    before = pyarrow.total_allocated_bytes()
    rows = CHATS.opened([tmp_path / "0"], kept)
    assert sum(len(one.input_ids) for one in rows) == 80 * 50_000
    assert pyarrow.total_allocated_bytes() - before < 1_000_000  # of 16 MB


def test_another_file_is_refused(tmp_path: Path) -> None:
    kept = [write(tmp_path / "0", [[sample(3, 1)]], CHATS)]
    with pytest.raises(ValueError, match="0 does not contain"):
        CHATS.opened([tmp_path / "0"], [[1, 1]])
    with pytest.raises(ValueError, match="0 does not contain"):
        preferences(1, 1).opened([tmp_path / "0"], kept)
    (tmp_path / "0").write_bytes((tmp_path / "0").read_bytes()[:-8])
    with pytest.raises(pyarrow.ArrowException):
        CHATS.opened([tmp_path / "0"], kept)


def test_sequences_are_joined() -> None:
    first, second = [sample(2, 1), sample(3, 1)], [sample(4, 4)]
    joined = Joined(first, [], second)
    assert len(joined) == 3 and list(joined) == [*first, *second] and joined[2] is second[0]
    assert len(Joined([], [])) == 0
    sizes = joined_sizes(*map(sizes_of, (first, [], second)))
    assert sizes.lengths.tolist() == [[2], [3], [4]] and sizes.targets.tolist() == [[1], [1], [4]]
    assert sizes.at(np.array([2, 0])).lengths.tolist() == [[4], [2]]
    pairs = sizes_of([Preference((sample(3, 1), sample(4, 2)), (0.0,))])
    assert joined_sizes(pairs, sizes_of([])).lengths.tolist() == [[3, 4]]


def test_only_reading_all_items_gives_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [write(tmp_path / "0", [[sample(2, 1)] * 200] * 3, CHATS)]
    rows = CHATS.opened([tmp_path / "0"], kept)
    beats: list[None] = []
    monkeypatch.setattr("hpc_rl.data.lazy.heart.beat", lambda: beats.append(None))
    assert [rows[index].input_ids.size for index in (0, 500, 1, 501)] == [2] * 4 and not beats
    assert len(list(rows)) == 600 and len(beats) == 3
    assert rows.sizes().lengths.sum() == 1200 and len(beats) == 6


def test_sizes_of_items_in_memory() -> None:
    lengths, targets = sizes_of([Preference((sample(3, 1), sample(4, 2)), (0.0,))])
    assert lengths.tolist() == [[3, 4]] and targets.tolist() == [[1, 2]]
    assert sizes_of([])[0].shape == (0, 1)


def test_pandas_is_not_imported(tmp_path: Path) -> None:
    program = """
import sys, pathlib
import numpy as np
from hpc_rl.data.pairs import Preference
from hpc_rl.data.sample_files import CHATS, preferences
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.data.tokenized import Writer
path, form = pathlib.Path(sys.argv[1]), preferences(1, 1)
with path.open("wb") as file:
    writer = Writer(file, form)
    writer.write([Preference((Sample(np.arange(3, dtype=np.int32), np.arange(3) > 1),), (0.5,))])
    writer.close()
rows = form.opened([path], [writer.kept])
print(rows[0].samples[0].input_ids.tolist(), rows[0].values, rows.sizes()[1].tolist(), "pandas" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "0")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "[0, 1, 2] (0.5,) [[1]] False\n", done.stderr
