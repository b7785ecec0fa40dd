"""Requests of agents as they are read, and how a request continues a conversation."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.data.reading.rows import Message
from hpc_rl.rl.endpoint.messages import IGNORED, Refusal, calls_of, new_messages, read_chat

USER = {"role": "user", "content": "Sum?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}

texts = st.text(max_size=8)
calls = st.lists(
    st.fixed_dictionaries({"id": texts, "function": st.fixed_dictionaries({
        "name": texts, "arguments": st.dictionaries(texts, st.integers() | texts, max_size=2),
    })}),
    min_size=1, max_size=2,
)  # fmt: skip
policys = st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}, optional={"tool_calls": calls})
others = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool"]), "content": texts}, optional={"name": texts, "tool_call_id": texts}
)
conversations = st.lists(others, min_size=1, max_size=3).flatmap(
    lambda first: st.lists(st.tuples(policys, others), max_size=3).map(
        lambda turns: [*first, *(message for turn in turns for message in turn)]
    )
)


def refused(body: object) -> str:
    with pytest.raises(Refusal) as refusal:
        read_chat(body)
    assert refusal.value.status == 400 and refusal.value.body()["error"]["message"] == str(refusal.value)
    return str(refusal.value)


def test_a_request_is_read() -> None:
    found = read_chat(
        {
            "model": "gpt-4",
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [CALL]},
                {"role": "tool", "content": "3", "tool_call_id": "c1", "extra": 1},
            ],
            "tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}],  # type: ignore[dict-item]
            "max_tokens": 9, "max_completion_tokens": 7, "stream": True, "stream_options": {"include_usage": True},
            "temperature": 0.3, "stop": None, "n": 1, "tool_choice": "auto", "logprobs": False,
        }
    )  # fmt: skip
    assert found.messages == [
        {"role": "system", "content": "a\nb"},
        {
            **{"role": "assistant", "content": ""},
            "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    assert found.tools == [{**TOOL, "function": {**TOOL["function"], "description": ""}}]  # type: ignore[dict-item]
    assert (found.max_tokens, found.streams, found.includes_usage, found.ignored) == (7, True, True, ("temperature",))
    assert calls_of(found.messages[1]) == [("add", {"a": 1, "b": [2]})]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"messages": []}, "the request has no messages"),
        ({"messages": None}, "the request has no messages"),
        ({"messages": "Sum?"}, "messages is str: send a list"),
        ({"messages": ["Sum?"]}, "message 1 is str: send a JSON object"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, 'message 1 has the role "narrator": choose one of'),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "message 1 has the role"),
        ({"messages": [{"role": "user"}]}, "message 1 has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1 has int as its content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads only text"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "which only the assistant makes"),
        ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}, USER]}, "the function of a tool call of message 1"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
                    USER,
                ]
            },
            "message 1 calls f with arguments that are no JSON object",
        ),
        ({"tools": [{"type": "web_search"}]}, 'tool 1 is of type "web_search": the policy calls only functions'),
        ({"tools": [{"type": "function", "function": {}}]}, "the name of tool 1 is NoneType: send text"),
        ({"max_tokens": 0}, "max_tokens is 0: send a whole number"),
        ({"max_tokens": True}, "max_tokens is true"),
        ({"n": 2}, "n=2 is not supported; set it to 1, or leave it out"),
        ({"stop": ["\n"]}, r'stop=["\n"] is not supported'),
        ({"logprobs": True}, "logprobs=true is not supported"),
        ({"tool_choice": "required"}, 'tool_choice="required" is not supported; set it to "auto"'),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"audio": {}}, "audio={} is not supported; leave it out"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], said: str) -> None:
    assert said in refused({"messages": [USER], **changed})


def test_what_has_no_effect_is_reported() -> None:
    assert read_chat({"messages": [USER], **dict.fromkeys(IGNORED, 1)}).ignored == IGNORED
    assert refused(None) == "the body is NoneType: send a JSON object"


def read(messages: list[Message]) -> list[Message]:
    """Send messages as a client does."""
    return read_chat({"messages": json.loads(json.dumps([*messages, USER]))}).messages[:-1]


@given(conversations, st.lists(others, min_size=1, max_size=2))
def test_a_request_that_repeats_all_messages_continues(earlier: list[Message], new: list[Message]) -> None:
    was = read(earlier)
    assert new_messages(was, [*read(earlier), *read(new)]) == read(new)


@given(conversations, st.lists(others, min_size=1, max_size=2), st.data())
def test_a_request_that_changes_a_message_is_refused(earlier: list[Message], new: list[Message], data: Any) -> None:
    was, number = read(earlier), data.draw(st.integers(0, len(earlier) - 1))
    changed = copy.deepcopy(was)
    message = changed[number]
    ways = ["role", "content", *(["call", "fewer"] if "tool_calls" in message else [])]
    match data.draw(st.sampled_from(ways)):
        case "role":
            message["role"] = "system"
        case "content":
            at = data.draw(st.integers(0, len(message["content"])))
            message["content"] = f"{message['content'][:at]}#{message['content'][at:]}"
        case "call":
            message["tool_calls"][-1]["function"]["arguments"]["#"] = 1
        case "fewer":
            del message["tool_calls"][-1]
    with pytest.raises(Refusal, match=rf"^message {number + 1} \({was[number]['role']}\): ") as refusal:
        new_messages(was, [*changed, *new])
    assert refusal.value.code == "other_messages" and "take another session" in str(refusal.value)


@given(conversations, st.data())
def test_a_request_that_adds_nothing_is_refused(earlier: list[Message], data: Any) -> None:
    was = read(earlier)
    fewer = was[: data.draw(st.integers(1, len(was)))]
    with pytest.raises(Refusal, match=rf"the session has {len(was)} messages, and the request repeats {len(fewer)} of"):
        new_messages(was, fewer)


def test_the_first_difference_is_named() -> None:
    policys = {"role": "assistant", "content": "It is 10."}
    assert new_messages([USER, policys], [USER, {**policys, "content": " It is 10.\n"}, USER]) == [USER]
    with pytest.raises(Refusal, match=r'from character 8 on: the session has "0\.", and the request "1\."'):
        new_messages([USER, policys], [USER, {**policys, "content": "It is 11."}, USER])
    with pytest.raises(
        Refusal, match=r'the content differs from character 5 on: the session has "", and the request "'
    ):
        new_messages([USER], [{**USER, "content": "Sum? "}, USER])
    with pytest.raises(Refusal, match=r"message 3 has the role system, but only messages of the roles user and tool"):
        new_messages([USER, policys], [USER, policys, {"role": "system", "content": "x"}])
    result = {"role": "tool", "content": "1", "tool_call_id": "c1"}
    with pytest.raises(Refusal, match=r'the session has tool_call_id "c1", and the request "c2"'):
        new_messages([result], [{**result, "tool_call_id": "c2"}, USER])
