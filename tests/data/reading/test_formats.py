"""Data files of every format, and files that cannot be read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from hpc_rl.data.reading.formats import FORMATS, CannotCheck, check_data_folder, is_file, read_rows
from hpc_rl.errors import UserError

ROWS = [{"question": "1 + 1?", "answer": "2"}, {"question": 'say "hi",\nthen stop ü', "answer": "\thi"}]
CSV = 'question,answer\n1 + 1?,2\n\n"say ""hi"",\nthen stop ü","\thi"\n'


def error_of(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
    return str(caught.value)


def contents(suffix: str) -> bytes:
    lines = [json.dumps(row) for row in ROWS]
    return {
        ".jsonl": f"{lines[0]}\n\n{lines[1]}\n",
        ".json": f" [\n{lines[0]},\n\n {lines[1]}]\n",
        ".csv": CSV,
        ".tsv": 'question\tanswer\r\n1 + 1?\t2\r\n"say ""hi"",\nthen stop ü"\t"\thi"\r\n',
    }[suffix].encode()


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv"])
def test_text_formats(tmp_path: Path, suffix: str, mark: bytes) -> None:
    for name in (f"rows{suffix}", f"ROWS{suffix.upper()}"):
        path = tmp_path / name
        path.write_bytes(mark + contents(suffix))
        assert is_file(str(path)) and list(read_rows(path)) == ROWS


def test_parquet(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert list(read_rows(tmp_path / "rows.parquet")) == ROWS


def test_every_format_is_tested() -> None:
    assert set(FORMATS) == {".jsonl", ".json", ".csv", ".tsv", ".parquet"}


def test_one_object_per_line_in_a_json_file_and_an_array_in_a_jsonl_file(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(contents(".jsonl"))
    (tmp_path / "rows.jsonl").write_bytes(contents(".json"))
    assert list(read_rows(tmp_path / "rows.json")) == list(read_rows(tmp_path / "rows.jsonl")) == ROWS
    (tmp_path / "none.json").write_text("[ ]")
    assert list(read_rows(tmp_path / "none.json")) == []


@given(st.lists(st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.text(max_size=5), max_size=3)))
def test_any_array_is_read_as_json_reads_it(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    for indent in (None, 2):
        path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
        assert list(read_rows(path)) == rows


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1', "line 1: not JSON (Expecting ',' delimiter); write one object per line, or an array"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2: not JSON (Expecting value)"),
        ("a.jsonl", '{"a": 1}\n3\n', "line 2: found a number; an object with the row's columns is needed"),
        ("a.jsonl", '{"a": 1}\n\n{"a": 1, "b": 2, "a": 3}\n', "line 3: the key 'a' appears twice"),
        ("a.jsonl", b'{"a": "\xff"}\n', "line 1: not UTF-8 text"),
        ("a.json", '[\n {"a": 1},\n 2]', "line 3: found a number; an object"),
        ("a.json", '[\n {"a": 1},\n {"a": }]', "line 3: not JSON (Expecting value)"),
        ("a.json", '[\n {"a": 1},\n {"a": 1, "a": 2}]', "line 3: the key 'a' appears twice"),
        ("a.json", '[{"a": 1}\n {"a": 2}]', "line 2: not JSON (the array is not closed, or a comma is missing)"),
        ("a.json", '[{"a": 1},\n', "line 2: not JSON (Expecting value)"),
        ("a.json", '[{"a": 1}]\n\n{}', "line 3: not JSON (text after the end of the array)"),
        ("a.json", b'["\xff"]', "not UTF-8 text"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", "line 3: values: 3, columns in the header: 2"),
        ("a.csv", 'a,b\n"x\ny",2\n1\n', "line 4: values: 1, columns in the header: 2"),
        ("a.csv", "a,b,a\n1,2,3\n", "the header has the column 'a' more than once"),
        ("a.csv", 'a,b\n"x"y,2\n', "line 2: not readable as csv"),
        ("a.tsv", 'a\tb\n"x\t2\n', "not readable as tsv (unexpected end of data)"),
        ("a.csv", b"a\n\xff\n", "not UTF-8 text"),
        ("a.txt", "text", "a.txt: .txt files are not read; convert it to one of .jsonl, .json, .csv, .tsv, .parquet"),
        ("a", "text", "a: the file name has no suffix; convert it to one of .jsonl"),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\noid", "is a git-lfs pointer instead of the file"),
        ("a.parquet", "version https://git-lfs.github.com/spec/v1\noid", "run `git lfs pull` in"),
        ("a.parquet", "PK", "is not a parquet file: it does not start with PAR1"),
        ("a.parquet", "PAR1 and then the copy ended", "is truncated: it does not end with PAR1"),
        ("a.parquet", "PAR1 no data and PAR1", "not readable as parquet"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    assert message in error_of(tmp_path / name)


BROKEN = {"messages": [{"role": "user", "content": "half \ud800 of a pair"}]}


def test_text_with_half_of_a_pair_of_surrogates_is_refused(tmp_path: Path) -> None:
    good, found = json.dumps(ROWS[0]), "row 2: not valid text in column 'messages' (a lone surrogate)"
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{json.dumps(BROKEN)}\n")
    (tmp_path / "a.json").write_text(f"[{good}, {json.dumps(BROKEN)}]")
    (tmp_path / "b.jsonl").write_text(f'{good}\n{{"a": {{"\\udfff": 1}}}}\n')
    (tmp_path / "whole.jsonl").write_text(json.dumps({"a": "a whole pair: \U0001f600 é"}))
    assert found in error_of(tmp_path / "a.jsonl") and found in error_of(tmp_path / "a.json")
    assert "row 2: not valid text in column 'a'" in error_of(tmp_path / "b.jsonl")
    assert len(list(read_rows(tmp_path / "whole.jsonl"))) == 1


def test_parquet_with_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    texts = pyarrow.array([b"a", b"b", b"\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"a": texts}), tmp_path / "a.parquet")
    assert "a.parquet, row 3: not valid text (" in error_of(tmp_path / "a.parquet")
    rows = read_rows(tmp_path / "a.parquet")
    assert [next(rows), next(rows)] == [{"a": "a"}, {"a": "b"}]


def test_rows_before_a_bad_one_are_read(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"a": 1}\n{'), ("a.json", '[{"a": 1}, {'), ("a.csv", "a\n1\n1,2\n")):
        (tmp_path / name).write_text(text)
        assert len(next(read_rows(tmp_path / name))) == 1


def test_long_fields(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n" + "x" * 200_000 + ",1\n")
    assert len(next(read_rows(tmp_path / "a.csv"))["a"]) == 200_000


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    assert error_of(tmp_path / "no.csv").endswith("no.csv: no such data file")
    assert not is_file("openai/gsm8k:main") and not is_file(str(tmp_path)) and is_file("no/such.parquet")
    (tmp_path / "no_suffix").touch()
    assert is_file(str(tmp_path / "no_suffix"))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (tmp_path / "bad.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CannotCheck, match="needs pyarrow, which is not installed here"):
        list(read_rows(tmp_path / "rows.parquet"))
    assert "is not a parquet file" in error_of(tmp_path / "bad.parquet")


def test_data_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the data folder is empty"):
        check_data_folder(tmp_path)
    (tmp_path / ".hidden.jsonl").touch()
    with pytest.raises(UserError, match="the data folder is empty"):
        check_data_folder(tmp_path)
    (tmp_path / "README.md").touch()
    with pytest.raises(UserError, match=r"no data file in this folder \(found README\.md\); formats: \.jsonl, \.json"):
        check_data_folder(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.CSV").touch()
    check_data_folder(tmp_path)
