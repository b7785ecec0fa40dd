"""Rows in parts: every rank reads its own blocks, and parses no others where the format allows it."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import Dataset
from pyarrow import parquet

from hpc_rl.data.reading import sources
from hpc_rl.data.reading.formats import read_some, runs
from hpc_rl.data.reading.sources import all_rows, blocks
from hpc_rl.errors import UserError

COUNT = 2500
ROWS = [{"prompt": f"{number}?", "response": f"a {number}, b"} for number in range(COUNT)]


def lines(path: Path) -> str:
    text = "".join(("\n \n" if number % 100 == 7 else "") + json.dumps(row) + "\n" for number, row in enumerate(ROWS))
    path.write_text(text)
    return str(path)


def array(path: Path) -> str:
    path.write_text(json.dumps(ROWS))
    return str(path)


def table(path: Path) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "response"], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)
    return str(path)


def columns(path: Path) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=700)
    return str(path)


def folder(path: Path) -> str:
    path.mkdir()
    lines(path / "train.jsonl")
    return str(path)


FILES = {"a.jsonl": lines, "a.json": array, "a.csv": table, "a.tsv": table, "a.parquet": columns, "folder": folder}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("parts", [1, 3])
def test_blocks_of_all_parts_are_all_rows(tmp_path: Path, name: str, parts: int) -> None:
    extra = tmp_path / "extra.jsonl"
    extra.write_text('{"prompt": "last", "response": "one"}\n' * 3)
    files = [FILES[name](tmp_path / name), str(extra)]
    whole = list(all_rows(files, "train"))
    assert [row for row, _ in whole[:COUNT]] == ROWS and len(whole) == COUNT + 3
    assert [whole[at][1] for at in (0, COUNT - 1, COUNT)] == [
        f"{files[0]}, row 1",
        f"{files[0]}, row {COUNT}",
        f"{extra}, row 1",
    ]
    shares = [list(blocks(files, "train", part, parts)) for part in range(parts)]
    count = sum(map(len, shares))
    assert count == 10  # 2,503 rows
    joined = [shares[block % parts][block // parts] for block in range(count)]
    assert [len(block) for block in joined] == [256] * 9 + [2503 - 9 * 256]
    assert [row for block in joined for row in block] == whole


def test_rows_of_other_parts_are_not_parsed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\nnot JSON\n\n{"a": 3}\n')
    assert list(read_some(file, lambda number: number != 1)) == [{"a": 1}, None, {"a": 3}]
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: not JSON"):
        list(read_some(file, lambda number: number == 1))


@pytest.mark.parametrize("name", ["a.parquet", "folder"])
def test_only_the_columns_that_are_needed_are_read(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"{number}?", "a.b": number, "long": "x" * 100} for number in range(300)]
    place = tmp_path / name
    if name == "folder":
        place.mkdir()
    file = place / "train.parquet" if name == "folder" else place
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)

    def read(*columns: str) -> list[dict[str, Any]]:
        return [row for block in blocks([str(place)], "train", 1, 2, columns) for row, _ in block]

    assert read("a.b", "prompt") == [{"prompt": row["prompt"], "a.b": row["a.b"]} for row in rows[256:]]
    assert read("prompt", "none") == read() == rows[256:], "the message about a missing column lists all others"


def test_columns_of_other_formats_are_all_read(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv"):
        assert next(read_some(FILES[name](tmp_path / name), lambda _: True, ["prompt"])) == ROWS[0]


def test_runs_of_rows() -> None:
    assert list(runs(3, 9, lambda number: number in (4, 5, 8))) == [
        (False, 3, 1),
        (True, 4, 2),
        (False, 6, 2),
        (True, 8, 1),
    ]


def test_a_file_is_identified_by_size_times_and_inode(tmp_path: Path) -> None:
    file = Path(lines(tmp_path / "a.jsonl"))
    before, found = sources.sources([str(file)], "train"), file.stat()
    assert before == [[""], [[found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]]]
    shutil.copy2(file, tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").replace(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)
    assert sources.sources([str(file)], "train") != before
    before = sources.sources([str(file)], "train")
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert sources.sources([str(file)], "train") != before
    with pytest.raises(UserError, match="no such data file"):
        sources.sources([str(tmp_path / "none.jsonl")], "train")
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match=r"\.txt files are not read"):
        sources.sources([str(tmp_path / "a.txt")], "train")


def test_a_data_set_is_identified_by_its_fingerprint(tmp_path: Path) -> None:
    name = folder(tmp_path / "folder")
    before = sources.sources([name], "train")
    assert before == sources.sources([name], "train") and before[0][0] and before[1][0][0][0] == "train.jsonl"
    (tmp_path / "folder" / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert sources.sources([name], "train") != before


def test_a_folder_whose_files_are_named_by_patterns(tmp_path: Path) -> None:
    """Its fingerprint stands for the patterns only."""
    data = tmp_path / "set" / "data"
    data.mkdir(parents=True)
    settings = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n"
    (tmp_path / "set" / "README.md").write_text(f"---\n{settings}---\n")
    columns(data / "train-0.parquet")
    name = str(tmp_path / "set")
    before = sources.sources([name], "train"), sources.local_states([name])
    (tmp_path / "set" / ".hidden").touch()
    assert before == (sources.sources([name], "train"), sources.local_states([name]))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[::-1]), data / "train-0.parquet", row_group_size=700)
    assert sources.sources([name], "train") != before[0] and sources.local_states([name]) != before[1]
    assert sources.local_states(["openai/gsm8k:main"]) == [[]]


def test_every_file_needs_a_row(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    files: list[Any] = [lines(tmp_path / "a.jsonl"), str(tmp_path / "empty.jsonl")]
    for part in (0, 1):
        with pytest.raises(UserError, match=r"empty\.jsonl: the data set is empty"):
            list(blocks(files, "train", part, 2))


def test_text_that_is_not_valid_is_refused_in_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Dataset.from_list([{"a": "x"}, {"a": "y"}])
    made.set_transform(lambda rows: {"a": ["x", "\ud800"]})
    monkeypatch.setattr("hpc_rl.data.reading.sources.load_split", lambda name, split: made)
    with pytest.raises(UserError, match="me/set, row 2: not valid text in column 'a'"):
        list(all_rows(["me/set"], "train"))
