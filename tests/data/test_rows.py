from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from hpc_rl.config.sft import DataConfig
from hpc_rl.data.rows import CannotCheck, check_file, read_rows, to_messages
from hpc_rl.errors import UserError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
PAIRS = DataConfig(train_files=["x.jsonl"], prompt_key="question", response_key="answer")


def written(folder: Path, *lines: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def message_of(call: Any, *args: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_jsonl_rows_and_empty_lines(tmp_path: Path) -> None:
    assert list(read_rows(written(tmp_path, {"a": 1}, "", {"a": "ü"}))) == [{"a": 1}, {"a": "ü"}]


def test_parquet_rows_lose_the_nulls_of_struct_columns(tmp_path: Path, data: DataConfig) -> None:
    named = [{**CHAT[0], "name": "Ann"}, CHAT[1]]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": named}] * 3), tmp_path / "rows.parquet")
    rows = list(read_rows(tmp_path / "rows.parquet"))
    assert len(rows) == 3 and to_messages(rows[0], data, "row 1") == named


def test_prompt_as_text_or_as_messages() -> None:
    expected = [{"role": "user", "content": "7+5?"}, {"role": "assistant", "content": "12"}]
    assert to_messages({"question": "7+5?", "answer": "12"}, PAIRS, "") == expected
    assert to_messages({"question": expected[:1], "answer": "12"}, PAIRS, "") == expected


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"mesages": CHAT, "id": 1}, ["'messages'", "id, mesages", "did you mean data.messages_key=mesages"]),
        ({"messages": CHAT[:1]}, ["row 2", "no assistant turn", "roles: user"]),
        ({"messages": "text"}, ["has text", "list of messages"]),
        ({"messages": []}, ["an empty list"]),
        ({"messages": None}, ["null"]),
        ({"messages": [{"from": "human", "value": "x"}]}, ["message 1", '"role"']),
        ({"messages": [{"role": "user", "content": None}, CHAT[1]]}, ["message 1", "no text"]),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, data: DataConfig, row: dict[str, Any], parts: list[str]) -> None:
    text = message_of(check_file, written(tmp_path, {"messages": CHAT}, row), data)
    assert all(part in text for part in [*parts, "rows.jsonl, row 2"]), text


def test_a_missing_prompt_column_names_its_option() -> None:
    text = message_of(to_messages, {"query": "a", "answer": "b"}, PAIRS, "f, row 1")
    assert "data.prompt_key" in text and "answer, query" in text
    assert "'answer' has null" in message_of(to_messages, {"question": "a", "answer": None}, PAIRS, "f, row 1")


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (['{"messages": 1', "{}"], "line 1: not JSON"),
        (["[", "1]"], "write one object per line"),
        (["{}", "3"], "line 2: a number"),
        ([], "empty"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, lines: list[str], part: str) -> None:
    def read(path: str) -> None:
        if not list(read_rows(path)):
            check_file(path, PAIRS)

    assert part in message_of(read, written(tmp_path, *lines))


def test_missing_files_and_other_kinds(tmp_path: Path, data: DataConfig) -> None:
    assert "no such data file" in message_of(check_file, str(tmp_path / "no.jsonl"), data)
    assert "no such" in message_of(check_file, str(tmp_path / "folder"), data)
    assert "not a .jsonl or .parquet" in message_of(list, read_rows("rows.csv"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    assert "not readable as parquet" in message_of(check_file, str(tmp_path / "bad.parquet"), data)


def test_what_only_the_job_can_check(tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotCheck, match="datasets"):
        check_file("openai/gsm8k:main", data)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").touch()
    with pytest.raises(CannotCheck, match="pyarrow"):
        check_file(str(tmp_path / "rows.parquet"), data)


def test_only_the_first_rows_are_checked(tmp_path: Path, data: DataConfig) -> None:
    path = written(tmp_path, {"messages": CHAT}, {"messages": CHAT}, "broken")
    assert check_file(path, data, max_rows=2) == 2
    assert "line 3" in message_of(check_file, path, data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["messages", "question", "answer"]), json_values, max_size=3))
def test_any_row_is_a_chat_or_a_one_line_error(row: dict[str, Any]) -> None:
    for config in (DataConfig(train_files=["x.jsonl"]), PAIRS):
        try:
            messages = to_messages(row, config, "file, row 1")
        except UserError as error:
            assert str(error).startswith("file, row 1: ") and "\n" not in str(error)
        else:
            assert any(m["role"] == "assistant" for m in messages)
            assert all(None not in m.values() for m in messages)
