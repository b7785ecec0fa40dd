"""Messages and tools in all forms that data sets have them in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpc_rl.config.compose import compose
from hpc_rl.config.rl.prompts import PromptDataConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.reading.preference_rows import to_pair
from hpc_rl.data.reading.rows import to_messages, to_prompt
from hpc_rl.data.templates.messages import Extras, as_chat, extras, without_effect
from hpc_rl.errors import UserError

ASKED = {"role": "user", "content": "?"}
SAID = {"role": "assistant", "content": "!"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SCHEMA = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}
DATA = DataConfig(train_files=["x.jsonl"])


def refusal_of(call: Any, *args: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert str(caught.value).startswith("f, row 1") and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "calling",
    [
        {"content": None, "tool_calls": [CALL]},
        {"tool_calls": [CALL]},
        {"tool_calls": [CALL], "function_call": None, "refusal": None, "audio": None, "name": None},
        {"tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": json.dumps('{"x": 1}')}}]},
        {"tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": [json.dumps(CALL)]},
        {"function_call": {"name": "f", "arguments": '{"x":1}'}},
    ],
)
def test_a_turn_that_calls_a_tool_has_one_form(calling: dict[str, Any]) -> None:
    assert as_chat([ASKED, {"role": "assistant", **calling}], "m", "f, row 1") == [ASKED, CALLING]


@pytest.mark.parametrize("arguments", ["", "{}", None, {}])
def test_a_call_without_arguments(arguments: Any) -> None:
    (found,) = as_chat([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}], "m", "")
    assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    "content",
    ["ab", [{"type": "text", "text": "ab"}], [{"type": "text", "text": "a"}, {"text": "b"}], ["a", "b"]],
)
def test_content_in_parts_of_text(content: Any) -> None:
    assert as_chat([{"role": "user", "content": content}], "m", "") == [{"role": "user", "content": "ab"}]


def test_other_fields_and_forms_of_messages() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert as_chat([refused], "m", "") == [{"role": "assistant", "content": "No."}]
    results = [{"role": "function", "name": "f", "content": "1"}, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    assert as_chat(results, "m", "") == [{**results[0], "role": "tool"}, results[1]]
    thought = {"role": "assistant", "content": "!", "reasoning_content": "hm"}
    assert as_chat([thought], "m", "") == [thought]
    by_field = {"role": ["user", "assistant"], "content": ["?", "!"]}
    assert as_chat(by_field, "m", "") == as_chat(json.dumps([ASKED, SAID]), "m", "") == [ASKED, SAID]
    assert as_chat([json.dumps(ASKED), json.dumps(SAID)], "m", "") == [ASKED, SAID]


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ["'image_url'", "only text"]),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, ["'input_audio'"]),
        ({"role": "user", "content": [{"type": "text", "text": "x", "train": False}]}, ["use `train` for the whole"]),
        ({"role": "user", "content": [7]}, ["a number as a part"]),
        ({"role": "user", "content": {"a": 1}}, ["an object in `content`"]),
        ({"role": "user", "content": b"x"}, ["bytes in `content`"]),
        ({"role": "user", "content": None}, ["no text in `content`"]),
        ({"role": "assistant", "content": None, "tool_calls": []}, ["no text in `content`"]),
        ({**SAID, "refusal": "No."}, ["both `content` and `refusal`"]),
        ({**SAID, "audio": {"id": "a"}}, ["`audio`", "sound"]),
        ({**SAID, "images": ["a.png"]}, ["`images`"]),
        ({**SAID, "train_detail": [{"begin_offset": 0}]}, ["`train_detail`", "use `train`"]),
        ({**SAID, "weight": 0.5}, ["0.5 in `weight`", "true or false"]),
        ({**SAID, "weight": 1, "train": False}, ["contradictory marks: train, weight"]),
        ({**ASKED, "train": True}, ["turn of the user with `train`", "only the assistant's"]),
        ({**CALLING, "tool_calls": {"name": "f"}}, ["an object in `tool_calls`"]),
        ({**CALLING, "tool_calls": [{"type": "custom", "custom": {}}]}, ["not of the form", '"function"']),
        ({**CALLING, "tool_calls": [{"name": "f", "arguments": '{"x": '}]}, ["'f'", "no JSON object: '{\"x\": '"]),
        ({**CALLING, "tool_calls": [{"name": "f", "arguments": "[1]"}]}, ["no JSON object"]),
        ({"from": "human", "value": "x"}, ['"role"', "ShareGPT's form: convert them with hpc-rl data convert"]),
    ],
)
def test_what_cannot_be_used_is_refused(message: dict[str, Any], parts: list[str]) -> None:
    text = refusal_of(as_chat, [message], "m", "f, row 1")
    assert all(part in text for part in ["message 1 of 'm'", *parts]), text


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": 0}, {"loss": False, "weight": 0}])
def test_turns_that_are_not_to_be_learned_are_marked(mark: dict[str, Any]) -> None:
    assert as_chat([{**SAID, **mark}, {**SAID, **dict.fromkeys(mark, 1)}], "m", "") == [{**SAID, "train": False}, SAID]
    assert as_chat([{**ASKED, "weight": 1}], "m", "") == [ASKED]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, Extras()),
        ({"tools": None, "chat_template_kwargs": None, "images": None, "videos": []}, Extras()),
        ({"tools": [TOOL]}, Extras([TOOL])),
        ({"tools": [{"function": SCHEMA}]}, Extras([TOOL])),
        ({"tools": [SCHEMA]}, Extras([TOOL])),
        ({"tools": [{"type": "function", **SCHEMA}]}, Extras([TOOL])),
        ({"tools": json.dumps([TOOL])}, Extras([TOOL])),
        ({"tools": [json.dumps(TOOL)]}, Extras([TOOL])),
        ({"tools": ""}, Extras()),
        ({"functions": [SCHEMA]}, Extras([TOOL])),
        ({"chat_template_kwargs": {"a": 1}}, Extras([], {"a": 1})),
        (
            {"chat_template_kwargs": '{"a": 1}', "enable_thinking": False},
            Extras([], {"a": 1, "enable_thinking": False}),
        ),
        ({"enable_thinking": 1}, Extras([], {"enable_thinking": True})),
        ({"enable_thinking": ""}, Extras()),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": None}},
            Extras([], {"enable_thinking": True}),
        ),
    ],
)
def test_columns_for_the_template(row: dict[str, Any], expected: Extras) -> None:
    assert extras(row, "f, row 1") == expected


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"tools": 3}, "'tools' has a number; a list of JSON schemas"),
        ({"tools": "search"}, "'tools' has text; a list of JSON schemas"),
        ({"tools": ["search"]}, "text as a tool"),
        ({"tools": [{"parameters": {}}]}, "an object as a tool"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' has a list"),
        ({"enable_thinking": "false"}, "'enable_thinking' has text; true or false is needed"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "the column 'enable_thinking' has True, and 'chat_template_kwargs' has False; remove one",
        ),
        *(({name: ["x"]}, f"column '{name}' has data, and only text") for name in ("images", "videos", "audio")),
    ],
)
def test_columns_that_cannot_be_used(row: dict[str, Any], part: str) -> None:
    assert part in refusal_of(extras, row, "f, row 1")


def test_a_system_column_begins_a_chat_without_one() -> None:
    system, own = {"role": "system", "content": "S"}, {"role": "system", "content": "own"}
    assert to_messages({"messages": [ASKED, SAID], "system": "S"}, DATA, "") == [system, ASKED, SAID]
    assert to_messages({"messages": [own, ASKED, SAID], "system": " own\n"}, DATA, "") == [own, ASKED, SAID]
    for nothing in ("", None, 3):
        assert to_messages({"messages": [ASKED, SAID], "system": nothing}, DATA, "") == [ASKED, SAID]
    prompts = PromptDataConfig(train_files=["x.jsonl"], answer_key=None)
    assert to_prompt({"messages": [ASKED], "system": "S"}, prompts, "")[0] == [system, ASKED]
    named = PromptDataConfig(train_files=["x.jsonl"], answer_key="system")
    assert to_prompt({"messages": [ASKED], "system": "S"}, named, "")[0] == [ASKED]
    dpo: Any = compose("dpo", ["model.path=m", "data.train_files=a"])
    pair = to_pair({"prompt": "?", "chosen": "!", "rejected": "x", "system": "S"}, dpo.data, "")
    assert (pair.chosen, pair.common) == ([system, ASKED, SAID], 2)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_column_beside_another_system_message_is_refused(role: str) -> None:
    asked = [{"role": role, "content": "own"}, ASKED]
    prompts = PromptDataConfig(train_files=["x.jsonl"], answer_key=None)
    dpo: Any = compose("dpo", ["model.path=m", "data.train_files=a"])
    turns = DataConfig(train_files=["x.jsonl"], prompt_key="prompt", response_key="completion")
    for read, row, data in (
        (to_messages, {"messages": [*asked, SAID]}, DATA),
        (to_messages, {"prompt": asked, "completion": "!"}, turns),
        (to_prompt, {"messages": asked}, prompts),
        (to_pair, {"prompt": asked, "chosen": "!", "rejected": "x"}, dpo.data),
    ):
        text = refusal_of(read, {**row, "system": "S"}, data, "f, row 1")
        assert f"the column 'system' and the {role} message of the chat have different texts" in text
        assert read(row, data, "f, row 1")


def test_a_system_column_without_text_has_no_effect() -> None:
    assert without_effect({"system": [{"type": "text", "text": "S"}]}, []) == ["system"]
    assert not without_effect({"system": "S"}, []) and not without_effect({"system": None}, [])


def test_prompt_and_response_may_be_chats() -> None:
    data = DataConfig(train_files=["x.jsonl"], prompt_key="prompt", response_key="completion")
    earlier = {"role": "assistant", "content": "earlier"}
    row = {"prompt": [ASKED, earlier, ASKED], "completion": [CALLING, {"role": "tool", "content": "1"}, SAID]}
    expected = [ASKED, {**earlier, "train": False}, ASKED, *row["completion"]]
    assert to_messages(row, data, "") == expected
    assert to_messages({"prompt": "?", "completion": [SAID]}, data, "") == [ASKED, SAID]
    assert to_messages({"prompt": '["a"]', "completion": "{}"}, data, "")[0]["content"] == '["a"]'
    text = refusal_of(to_messages, {"prompt": "?", "completion": [ASKED, SAID]}, data, "f, row 1")
    assert "'completion' begins with a turn of the user" in text and "data.messages_key=completion" in text


def test_a_second_part_of_the_prompt_is_not_left_out() -> None:
    data = DataConfig(train_files=["x.jsonl"], prompt_key="instruction", response_key="output")
    row = {"instruction": "Add.", "input": "", "output": "3"}
    assert to_messages(row, data, "")[0]["content"] == "Add."
    text = refusal_of(to_messages, {**row, "input": "1 2"}, data, "f, row 1")
    assert "leaves out the column 'input'" in text and "hpc-rl data convert" in text
    prompts = PromptDataConfig(train_files=["x.jsonl"], prompt_key="instruction", answer_key="output")
    assert to_prompt(row, prompts, "")[0][0]["content"] == "Add."
    assert refusal_of(to_prompt, {**row, "input": "1 2"}, prompts, "f, row 1") == text


def test_a_missing_answer_of_pandas_is_null() -> None:
    data = PromptDataConfig(train_files=["x.jsonl"])
    assert "'answer' has null" in refusal_of(to_prompt, {"messages": "?", "answer": float("nan")}, data, "f, row 1")
