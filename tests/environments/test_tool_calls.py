from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.environments.tool_calls import PARSERS, MalformedCall, ToolCall, after_thinking, find_parser, guess_format
from hpc_rl.errors import UserError

ADD = ToolCall("add", {"a": 1, "b": "x"})


def hermes(call: ToolCall) -> str:
    return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"


def bare(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "parameters": call.arguments})


def xml(call: ToolCall) -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(ToolCall, st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3))
# Text is all that this format has, without its own tags; names of parameters are names of Python.
WORDS = st.from_regex(r"[a-z_]\w*", fullmatch=True)
TEXTS = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]))
XML_CALLS = st.builds(ToolCall, WORDS, st.dictionaries(WORDS, TEXTS, max_size=3))


@given(st.lists(CALLS, min_size=1, max_size=3), st.sampled_from(["", "I call a tool.\n", "\n"]))
def test_round_trip_of_json(calls: list[ToolCall], before: str) -> None:
    assert PARSERS["hermes"](before + "\n".join(map(hermes, calls))) == calls
    assert PARSERS["json"](before + ";".join(map(bare, calls))) == calls
    assert PARSERS["json"](before + "".join(f"```json\n{bare(call)}\n```\n" for call in calls)) == calls
    assert PARSERS["json"](before + f"[{', '.join(map(bare, calls))}]") == calls


@given(st.lists(XML_CALLS, min_size=1, max_size=3))
def test_round_trip_of_xml(calls: list[ToolCall]) -> None:
    assert PARSERS["xml"]("text\n" + "\n".join(map(xml, calls))) == calls


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<think>"),
        *("</think>", "```json\n", "```", '{"name": ', '"arguments"', ": ", "{", "}", "[", "]", '"', "\\", "\n", ","),
        *("1" * 5000, "NaN", "[" * 3000, '{"a":' * 2000),
    ]
)


@given(st.lists(FRAGMENTS | st.text(), max_size=12).map("".join))
def test_no_text_makes_a_parser_raise(text: str) -> None:
    for parse in PARSERS.values():
        for found in parse(text):
            assert found.reason if isinstance(found, MalformedCall) else found.name


@pytest.mark.parametrize("before", ["", "<tool_call>", "<function=f>", "```json\n", "<parameter=x>"])
def test_long_texts_take_no_quadratic_time(before: str) -> None:
    for text in ("<tool_call>{" * 20_000, "<function=f><parameter=" * 20_000, "\n{" * 20_000, before + "[" * 100_000):
        for parse in PARSERS.values():
            parse(before + text)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", "no call", []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}', [ADD]),  # cut off behind the object
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}</tool_call>', [ADD]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [ToolCall("now", {})]),
        ("hermes", hermes(ToolCall("f", {"x": "</tool_call>"})), [ToolCall("f", {"x": "</tool_call>"})]),
        ("json", f"{bare(ADD)} and text", [ADD]),
        ("json", f"<|python_tag|>{bare(ADD)}", [ADD]),
        ("json", '{"answer": 3}', []),
        ("json", "[1, 2]", []),
        ("json", 'The call {"name": "add", "arguments": {}} is within a line', []),
        ("xml", "<function=f></function>", [ToolCall("f", {})]),
        ("xml", "<function=f><parameter=x>a\n\n</parameter></function>", [ToolCall("f", {"x": "a\n"})]),
    ],
)  # fmt: skip
def test_texts(name: str, text: str, expected: list[ToolCall]) -> None:
    assert PARSERS[name](text) == expected


@pytest.mark.parametrize(
    ("name", "text", "tool", "part"),
    [
        ("hermes", "<tool_call>add(1)</tool_call>", "", "not valid JSON \\(Expecting value, at character 1"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a"', "", "not valid JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "", "has no name; write it as <tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add", '"arguments" are no JSON object'),
        ("json", '{"name": "add", "arguments": {"a": 1}', "", "not valid JSON"),
        ("json", '{"name": 3, "arguments": {}}', "", "has no name"),
        ("xml", "<function=add><parameter=a>1", "add", "does not end after 0 parameters"),
        ("xml", "<function=add><parameter=a>1</parameter>", "add", "does not end after 1 parameters"),
        ("xml", "<function=></function>", "", "has no name"),
        ("xml", hermes(ADD), "", "no function in <tool_call>"),
    ],
)
def test_malformed_calls(name: str, text: str, tool: str, part: str) -> None:
    (found,) = PARSERS[name](text)
    assert isinstance(found, MalformedCall) and found.name == tool and re.search(part, found.reason), found


@pytest.mark.parametrize(
    ("text", "in_thinking", "left"),
    [
        ("<think>a</think>b</think>c", False, "b</think>c"),
        ("\n<think>a", False, ""),
        ("a</think>b", True, "b"),
        ("a", True, ""),
        ("a</think>b", False, "a</think>b"),
    ],
)
def test_thinking(text: str, in_thinking: bool, left: str) -> None:
    assert after_thinking(text, in_thinking) == left


def test_the_next_call_is_read_after_a_malformed_one() -> None:
    found = PARSERS["hermes"](f"<tool_call>no</tool_call>{hermes(ADD)}")
    assert isinstance(found[0], MalformedCall) and found[1:] == [ADD]
    found = PARSERS["xml"](f"<function=f>no{xml(ADD)}")
    assert isinstance(found[0], MalformedCall) and found[1:] == [ToolCall("add", {"a": "1", "b": "x"})]


def test_the_format_of_a_template() -> None:
    assert guess_format("{% if tools %}<tool_call>\n<function=example_function_name>") == "xml"
    assert guess_format("<tool_call>{{ tool_call.arguments | tojson }}") == "hermes"
    assert guess_format("{% if message.tool_calls %}") == "json"
    assert find_parser("auto", "<tool_call>") is PARSERS["hermes"]
    with pytest.raises(UserError, match="shows the model no tools"):
        find_parser("auto", "{{ messages }}")
    with pytest.raises(UserError, match="choose one of auto, hermes, json, xml"):
        find_parser("no", "")
