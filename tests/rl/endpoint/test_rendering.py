"""Messages of agents as tokens, and turns of the policy as messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpc_rl.environments.tool_calls import MalformedCall, ToolCall
from hpc_rl.rl.endpoint.messages import Refusal
from hpc_rl.rl.endpoint.rendering import Rendering
from hpc_rl.rl.rollout.engine import Completion
from tests.environments.templates import CHATML, OPENS_THINKING, QWEN3_WITHOUT_SWITCH
from tests.helpers import make_tokenizer
from tests.rl.ppo_config import ppo_config

USER = {"role": "user", "content": "Sum?"}
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'


def tool(**properties: Any) -> dict[str, Any]:
    body = {"name": "add", "description": "", "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": body}


def rendering(template: str, *options: str) -> Rendering:
    made = make_tokenizer(320)
    made.add_tokens(["<tool_call>", "</tool_call>"])
    made.chat_template = template
    return Rendering(made, ppo_config("agent.endpoint=loopback", *options))


def turn(text: str, finished: bool = True) -> Completion:
    ids = make_tokenizer(320)(text, add_special_tokens=False)["input_ids"] + [0] * finished
    return Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), finished)


@pytest.mark.parametrize(
    ("template", "text", "thinking", "said", "calls"),
    [
        (CHATML, " It is 3.\n", "", "It is 3.", 0),
        (CHATML, "<think>\nhm " + CALL + "\n</think>\n\nIt is 3.", "hm " + CALL, "It is 3.", 0),
        (OPENS_THINKING, "hm\n</think>\n\nI add." + CALL + CALL, "hm", "I add.", 2),
        (OPENS_THINKING, "hm", "hm", "", 0),
        (CHATML, "```\n1 + 2\n```", "", "```\n1 + 2\n```", 0),
    ],
)
def test_a_turn_as_a_message(template: str, text: str, thinking: str, said: str, calls: int) -> None:
    found = rendering(template, "agent.tool_format=hermes").read(turn(text), [tool(x={"type": "integer"})])
    assert found == (thinking, said, [ToolCall("add", {"x": 1})] * calls)


def test_calls_that_cannot_be_read_stay_in_the_text() -> None:
    own = rendering(CHATML, "agent.tool_format=hermes")
    _, said, calls = own.read(turn("So. <tool_call>{"), [tool()])
    assert said == "So. <tool_call>{" and len(calls) == 1 and isinstance(calls[0], MalformedCall)
    _, said, calls = own.read(turn("So. <tool_call>{</tool_call>" + CALL), [tool()])
    assert said == "So." and [type(call) for call in calls] == [MalformedCall, ToolCall]
    assert own.read(turn("So." + CALL), []) == ("", "So." + CALL, []), "the agent has no tools"
    assert own.read(turn("So." + CALL, finished=False), [tool()]) == ("", "So." + CALL, []), "it was cut off"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "string"}, "3", "3"),
        ({"type": ["string", "null"]}, "3", "3"),
        ({"type": ["integer", "null"]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", "3"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"type": "array", "items": {"type": "string"}}, '["a"]', ["a"]),
        ({}, "3", "3"),
        (True, "3", "3"),
    ],
)
def test_arguments_without_types_get_those_of_the_tool(schema: Any, text: str, value: Any) -> None:
    own = rendering(CHATML, "agent.tool_format=xml")
    written = f"<function=add><parameter=x>{text}</parameter><parameter=y>{text}</parameter></function>"
    assert own.read(turn(written), [tool(x=schema)])[2] == [ToolCall("add", {"x": value, "y": text})]
    other = tool(x=schema)
    other["function"]["name"] = "sub"
    assert own.read(turn(written), [other])[2] == [ToolCall("add", {"x": text, "y": text})]


def test_what_does_not_fit_the_template_is_refused() -> None:
    own = rendering("{% for" + CHATML.partition("{% for")[2])
    assert own.prompt_ids([USER], [])
    with pytest.raises(Refusal, match=r"the chat template shows the model no tools"):
        own.prompt_ids([USER], [tool()])
    own = rendering(QWEN3_WITHOUT_SWITCH)
    own.prompt_ids([USER], [])
    own.added_ids(turn("It is 3."), [{"role": "tool", "content": "3"}], [])
    with pytest.raises(Refusal, match=r"set data.chat_template to a file") as refusal:
        own.added_ids(turn("It is 3."), [USER], [])
    assert refusal.value.code == "chat_template"


def test_a_template_is_checked_once_for_each_set_of_tools() -> None:
    own = rendering(CHATML)
    for _ in range(3):
        own.added_ids(turn("It is 3."), [USER], [])
        own.added_ids(turn("It is 3."), [{"role": "tool", "content": "3"}], [])
    assert own._turns.cache_info().misses == 2
