from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_rl.environments.loading import load_definition
from hpc_rl.environments.protocol import Episode, as_text, cut, first_messages, fitting, observed, read_step
from hpc_rl.environments.tool_calls import MalformedCall, ToolCall
from tests.environments.conftest import Write

TOOLS = '''
import sys
class Own:
    closed = []
    def reset(self, question):
        return [{"role": "user", "content": question}]
    def divide(self, a: float, b: float) -> float:
        """Divide."""
        return a / b
    def leave(self) -> None:
        """Leave."""
        sys.exit(3)
    def long(self, n: int) -> str:
        """Write much."""
        return "x" * n
    def reward(self):
        return {"score": 1, "other": 2, "text": "ignored"}
    def close(self):
        self.closed.append(1)
'''
STEPS = """
class Own:
    def step(self, text):
        return {"none": None, "end": ("bye", True), "gym": ("more", 0.25, False, {}), "text": "next"}.get(text, 5)
"""


def episode(write: Write, source: str, most_chars: int = 50) -> Episode:
    return Episode(load_definition(write(source), {}), most_chars)


def content(write: Write, *calls: ToolCall | MalformedCall) -> list[str]:
    return [message["content"] for message in episode(write, TOOLS).answer("", calls).messages]


def test_failing_calls_become_messages(write: Write) -> None:
    assert content(write, ToolCall("divide", {"a": 1, "b": 0})) == ["Error: ZeroDivisionError: float division by zero"]
    assert content(write, ToolCall("leave", {})) == ["Error: SystemExit: 3"]
    assert content(write, MalformedCall("no")) == ["Error: no"]
    (unknown,) = episode(write, TOOLS, 200).answer("", [ToolCall("mul", {})]).messages
    assert unknown["content"] == "Error: there is no tool 'mul'; the tools are: divide, leave, long"
    reply = episode(write, TOOLS).answer(
        "", [ToolCall("divide", {"a": 1, "b": 0}), ToolCall("divide", {"a": 1, "b": 2})]
    )
    assert (reply.calls, reply.bad_calls, reply.done) == (2, 1, False)
    assert [message["role"] for message in reply.messages] == ["tool", "tool"]
    assert reply.messages[1] == {"role": "tool", "name": "divide", "content": "0.5"}
    unread = episode(write, TOOLS).answer("", [ToolCall("divide", {"a": "x"}), MalformedCall("?", "divide")])
    assert (unread.calls, unread.bad_calls) == (0, 2) and unread.messages[1]["name"] == "divide"


def test_output_is_cut(write: Write) -> None:
    assert content(write, ToolCall("long", {"n": 50})) == ["x" * 50]
    assert content(write, ToolCall("long", {"n": 5000})) == [
        "x" * 25 + "\n[4,950 characters are left out]\n" + "x" * 25
    ]
    assert cut("abcdef", 3) == "ab\n[3 characters are left out]\nf"
    assert cut("abcdef", 0) == "\n[6 characters are left out]\n"


def test_reward_and_close(write: Write) -> None:
    running = episode(write, TOOLS)
    assert running.reset({"question": "q", "other": 1}) == [{"role": "user", "content": "q"}]
    assert running.answer("no call", []).done
    result = running.result()
    assert (result.score, result.components) == (1.0, {"other": 2.0})
    assert running._environment.closed == [1]


def test_steps(write: Write) -> None:
    running = episode(write, STEPS)
    assert running.answer("none", []).done
    reply = running.answer("end", [])
    assert reply.done and reply.messages == [{"role": "user", "content": "bye"}]
    assert running.result().score is None
    assert not running.answer("gym", []).done and not running.answer("gym", []).done
    assert running.result().score == 0.5
    with pytest.raises(ValueError, match="expected text, or messages"):
        running.answer("?", [])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("a", ("a", None, False)),
        (("a", True), ("a", None, True)),
        (("a", 1, True, {}), ("a", 1, True)),
        (("a", 1, True, False, {}), ("a", 1, True)),
        (("a", 1, False, True, {}), ("a", 1, True)),
        (("a", 1, False, False, {}), ("a", 1, False)),
    ],
)
def test_what_step_returns(found: Any, expected: Any) -> None:
    assert read_step(found) == expected


def test_a_step_of_another_length() -> None:
    with pytest.raises(ValueError, match="tuple of 3 values"):
        read_step(("a", 1, 2))


def test_observations() -> None:
    message = {"role": "user", "content": "a"}
    assert observed(None) == [] and observed("a") == observed([message]) == observed(message) == [message]
    for wrong in (5, [5], [{"role": "user"}], {"content": "a"}, {"role": "user", "content": Path("a")}):
        with pytest.raises(ValueError, match="as an observation"):
            observed(wrong)


def test_the_first_observation() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    assert first_messages([system, user], None) == [system, user]
    assert first_messages([system, user], "more") == [system, {"role": "user", "content": "u\n\nmore"}]
    assert first_messages([system], "more") == [system, {"role": "user", "content": "more"}]
    assert first_messages([], [user]) == [user]
    assert first_messages([user], [user]) == [user, user]


def test_texts() -> None:
    assert [as_text(value) for value in ("ü", 1, None, {"a": ["ü"]}, {1})] == [
        "ü",
        "1",
        "null",
        '{"a": ["ü"]}',
        '"{1}"',
    ]
    itself: list[Any] = []
    itself.append(itself)
    assert as_text(itself) == "[[...]]"


def test_columns_that_fit() -> None:
    row = {"a": 1, "b": 2}
    assert fitting(lambda a: 0, row) == {"a": 1}
    assert fitting(lambda **all: 0, row) == row
    assert fitting(lambda a, /, *b: 0, row) == {"b": 2} or fitting(lambda a, /, b: 0, row) == {"b": 2}
