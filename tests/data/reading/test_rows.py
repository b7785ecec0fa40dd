from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.prompts import PromptDataConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.reading.formats import CannotCheck, read_rows
from hpc_rl.data.reading.row_checks import check_batch_size, check_file, check_row
from hpc_rl.data.reading.rows import to_messages, to_prompt
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


@pytest.mark.parametrize(
    ("kind", "options", "columns"),
    [
        ("sft", (), ["messages"]),
        ("sft", ("data.messages_key=chat",), ["chat"]),
        ("distill", ("data.prompt_key=question", "data.response_key=answer", "teacher.path=t"), ["question", "answer"]),
        ("dpo", ("data.chosen_key=better",), ["prompt", "better", "rejected"]),
        ("dpo", ("data.label_key=good", "algorithm.loss=kto"), ["prompt", "response", "good"]),
        ("rm", ("data.margin_key=by",), ["prompt", "chosen", "rejected", "by"]),
        ("rm", ("data.label_keys=[a,b]", "data.response_key=text"), ["prompt", "text", "a", "b"]),
    ],
)
def test_the_columns_that_a_row_needs(kind: str, options: tuple[str, ...], columns: list[str]) -> None:
    """Reading a row that has no other columns works; see to_messages and to_preference."""
    config: Any = compose(kind, ["model.path=m", "data.train_files=a", *options])
    assert config.data.columns == columns
    text = {name: "1" if name in ("good", "by", "a", "b") else f"the {name}" for name in columns}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    row = {name: chat for name in columns} if len(columns) == 1 else text
    check_row(row, config.data, "a row")


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
        ({"messages": "text"}, ["has text", "list of messages", "set data.prompt_key and data.response_key"]),
        ({"messages": []}, ["an empty list"]),
        ({"messages": None}, ["null"]),
        ({"messages": [{"from": "human", "value": "x"}]}, ["message 1", '"role"']),
        ({"messages": [{"role": "user", "content": None}, CHAT[1]]}, ["message 1", "no text"]),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, data: DataConfig, row: dict[str, Any], parts: list[str]) -> None:
    text = message_of(check_file, written(tmp_path, {"messages": CHAT}, row), data)
    assert all(part in text for part in [*parts, "rows.jsonl, row 2"]), text


@pytest.mark.parametrize(
    ("row", "suggestion"),
    [
        ({"question": "a", "response": "b"}, "set data.prompt_key=question data.response_key=response"),
        ({"prompt": "a", "completion": "b"}, "set data.prompt_key=prompt data.response_key=completion"),
        (
            {"instruction": "a", "input": "", "output": "b"},
            "shape alpaca: convert them with hpc-rl data convert FILE --output NEW.jsonl",
        ),
        ({"Question": "a", "Answer": "b"}, "set data.prompt_key=Question data.response_key=Answer"),
        ({"dialog": CHAT, "question": "a", "answer": "b"}, "set data.messages_key=dialog"),
        ({"text": "a"}, "columns: text; set data.messages_key"),
        ({"question": "a", "text": "b"}, "columns: question, text; set data.messages_key"),
    ],
)
def test_columns_with_common_names_are_suggested(data: DataConfig, row: dict[str, Any], suggestion: str) -> None:
    text = message_of(to_messages, row, data, "f, row 1")
    assert "no column 'messages' (data.messages_key)" in text and text.endswith(suggestion)


@pytest.mark.parametrize(
    ("row", "suggestion"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "set data.prompt_key=prompt data.response_key=chosen"),
        ({"chosen": CHAT, "rejected": CHAT}, "set data.messages_key=chosen"),
        ({"Preferred": "b", "rejected": "c"}, "set data.prompt_key=COLUMN data.response_key=Preferred"),
    ],
)
def test_pairs_are_for_other_jobs(data: DataConfig, row: dict[str, Any], suggestion: str) -> None:
    text = message_of(to_messages, row, data, "f, row 1")
    assert "found a pair of responses (columns " in text and "hpc-rl submit dpo and rm" in text
    assert text.endswith(suggestion)
    assert to_messages({**row, "messages": CHAT}, data, "f, row 1") == CHAT


def test_chats_need_no_columns_of_text() -> None:
    hint = "columns: messages; set data.messages_key=messages and leave out data.prompt_key and data.response_key"
    assert message_of(to_messages, {"messages": CHAT}, PAIRS, "f, row 1").endswith(hint)


def test_prompt_and_answer_columns_are_suggested() -> None:
    prompts = PromptDataConfig(train_files=["x.jsonl"])
    row = {"problem": "a", "solution": "b"}
    assert message_of(to_prompt, row, prompts, "f, row 1").endswith("set data.prompt_key=problem")
    asked = prompts.model_copy(update={"prompt_key": "problem"})
    assert message_of(to_prompt, row, asked, "f, row 1").endswith("set data.answer_key=solution")


def test_a_batch_is_at_most_the_data() -> None:
    check_batch_size(64, 64)
    assert "data.train_batch_size 64 is larger than the training data (63 rows)" in message_of(check_batch_size, 63, 64)


def test_a_missing_prompt_column_names_its_option() -> None:
    text = message_of(to_messages, {"query": "a", "answer": "b"}, PAIRS, "f, row 1")
    assert "data.prompt_key" in text and "answer, query" in text
    assert "'answer' has null" in message_of(to_messages, {"question": "a", "answer": None}, PAIRS, "f, row 1")


def test_missing_and_empty_files(tmp_path: Path, data: DataConfig) -> None:
    assert "no such data file" in message_of(check_file, str(tmp_path / "no.jsonl"), data)
    assert "no such file or folder" in message_of(check_file, str(tmp_path / "folder"), data)
    assert "the data set is empty" in message_of(check_file, written(tmp_path), data)


def test_only_the_job_can_load_a_data_set_by_its_name(data: DataConfig) -> None:
    with pytest.raises(CannotCheck, match="is a `datasets` name"):
        check_file("openai/gsm8k:main", data)


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


@given(st.dictionaries(st.sampled_from(["messages", "question", "answer"]), json_values, max_size=3))
def test_any_row_is_a_chat_or_a_one_line_error(row: dict[str, Any]) -> None:
    for config in (DataConfig(train_files=["x.jsonl"]), PAIRS):
        try:
            messages = to_messages(row, config, "file, row 1")
        except UserError as error:
            assert str(error).startswith("file, row 1: ") and "\n" not in str(error)
        else:
            assert any(m["role"] == "assistant" for m in messages)
            assert all(part is not None for m in messages for name, part in m.items() if name != "content")
            assert all(m["content"] is not None or m["tool_calls"] for m in messages)
