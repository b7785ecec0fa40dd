from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.environments.pool import EnvironmentPool
from hpc_rl.environments.requests import EnvironmentSpec
from hpc_rl.environments.tool_calls import MalformedCall, ToolCall
from hpc_rl.errors import RunError, UserError
from hpc_rl.system.processes import descendants
from tests.environments.conftest import Write

DEADLINE_S = 600
PROMPT = [{"role": "user", "content": "1 + 2?"}]
OWN = '''
import os, subprocess, sys, time
from multiprocessing.connection import Connection

class Own:
    def reset(self, **row):
        self.total = row.get("start", 0)
        if self.total == "hang": time.sleep(600)
        if self.total == "raise": raise RuntimeError("no start")
        return "Go."

    def add(self, x: int) -> int:
        """Add."""
        self.total += x
        return self.total

    def pid(self) -> int:
        """Return the process."""
        return os.getpid()

    def wait(self, seconds: float) -> str:
        """Wait."""
        time.sleep(seconds)
        return "waited"

    def hang(self) -> None:
        """Hang, with a process that has a session of its own."""
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(600)

    def die(self) -> None:
        """End the process."""
        os._exit(3)

    def fork(self) -> int:
        """Return the exit status of a copy of this process."""
        if child := os.fork(): return os.waitpid(child, 0)[1]
        self.total = 99
        sys.exit(7)

    def interfere(self) -> None:
        """Answer another request."""
        Connection(os.dup(int(sys.argv[1]))).send((0, "answer"))

    def long(self) -> str:
        """Write much."""
        return "x" * 10_000

    def reward(self):
        if self.total == 13: raise ValueError("unlucky")
        if self.total == 17: time.sleep(600)
        return {"score": self.total, "other": 1}
'''
Open = Callable[..., EnvironmentPool]


@pytest.fixture
def opened(write: Write) -> Iterator[Open]:
    """An EnvironmentPool; it is closed after the test, and nothing of it is left."""
    pools, before = [], set(descendants(os.getpid()))

    def opener(source: str = OWN, workers: int = 1, timeout_s: float = 60) -> EnvironmentPool:
        pools.append(EnvironmentPool(EnvironmentSpec(write(source), {}, [], 1000), workers, timeout_s))
        return pools[-1]

    yield opener
    for pool in pools:
        pool.close()
    assert set(descendants(os.getpid())) <= before


def said(future: Any) -> list[str]:
    return [message["content"] for message in future.result(DEADLINE_S).messages]


def test_conversations_of_one_process_keep_their_own_state(opened: Open) -> None:
    pool = opened()
    assert [schema["function"]["name"] for schema in pool.offered.schemas] == [
        "add",
        "pid",
        "wait",
        "hang",
        "die",
        "fork",
        "interfere",
        "long",
    ]
    assert pool.offered.has_reward and not pool.offered.has_step
    one, two = pool.start(PROMPT, {"start": 1}), pool.start(PROMPT, {"start": 10})
    assert said(one.first) == ["1 + 2?\n\nGo."]
    answers = [
        each.answer("", [ToolCall("add", {"x": 1}), MalformedCall("no"), ToolCall("add", {"x": 1})])
        for each in (one, two)
    ]
    assert [said(answer) for answer in answers] == [["2", "Error: no", "3"], ["11", "Error: no", "12"]]
    reply = answers[0].result()
    assert (reply.calls, reply.bad_calls, reply.done, reply.error) == (2, 1, False, None)
    outcome = two.finish().result(DEADLINE_S)
    assert (outcome.score, outcome.components, outcome.error) == (12.0, {"other": 1.0}, None)
    assert one.answer("the end", []).result(DEADLINE_S).done and one.finish().result(DEADLINE_S).score == 3.0
    assert len(said(pool.start(PROMPT, {}).answer("", [ToolCall("long", {})]))[0]) < 1100


def test_conversations_are_spread_over_the_processes(opened: Open) -> None:
    pool = opened(workers=2)
    running = [pool.start(PROMPT, {}) for _ in range(4)]
    pids = [said(each.answer("", [ToolCall("pid", {})]))[0] for each in running]
    assert pids[0] == pids[2] != pids[1] == pids[3]
    running[1].finish().result(DEADLINE_S)
    assert said(pool.start(PROMPT, {}).answer("", [ToolCall("pid", {})]))[0] == pids[1]


def test_a_copy_that_a_tool_forks_answers_nothing(opened: Open) -> None:
    pool = opened()
    one, two = pool.start(PROMPT, {"start": 1}), pool.start(PROMPT, {"start": 10})
    assert said(one.answer("", [ToolCall("fork", {}), ToolCall("add", {"x": 1})])) == ["0", "2"]
    assert said(two.answer("", [ToolCall("add", {"x": 1})])) == ["11"]
    assert [each.finish().result(DEADLINE_S).score for each in (one, two)] == [2.0, 11.0]


def test_the_limit_is_for_each_call(opened: Open) -> None:
    calls = [ToolCall("wait", {"seconds": 4})] * 4
    assert said(opened(timeout_s=15).start(PROMPT, {}).answer("", calls)) == ["waited"] * 4


OF_ITS_OWN = """
import enum, time

class Role(str, enum.Enum):
    USER = "user"

class Number(int):
    pass

class Own:
    def reset(self, wait=0, **row):
        time.sleep(wait)
        return "Go."

    def step(self, text):
        content = [{"type": "text", "text": Number(1)}] if text == "bad" else "go on"
        return [{"role": Role.USER, "content": content}], 0.0, False, {}
"""


def test_values_of_the_users_own_classes(opened: Open) -> None:
    """A role becomes text. What this process cannot read ends the conversation, and no other one."""
    pool = opened(OF_ITS_OWN)
    one, other = pool.start(PROMPT, {}), pool.start(PROMPT, {})
    assert said(one.answer("go", [])) == said(other.answer("go", [])) == ["go on"]
    reply = one.answer("bad", []).result(DEADLINE_S)
    assert reply.done and "its row or its answer cannot be passed on: " in (reply.error or "")
    assert one.finish().result(DEADLINE_S).error == reply.error
    assert said(other.answer("go", [])) == ["go on"]
    unsendable = pool.start(PROMPT, {"row": lambda: None})
    assert "its row or its answer cannot be passed on: " in (unsendable.first.result(DEADLINE_S).error or "")


NO_TEXT = r"""
class Own:
    def reset(self, **row):
        if row: raise ValueError("\ud83d")
        return [{"role": "user", "content": [{"type": "text", "text": "\ud83d\ude00 \ud83d"}]}]

    def echo(self, text: str) -> str:
        "Return the text."
        return text

    def step(self, text):
        return "\ude00 and"
"""


def test_texts_have_no_lone_surrogates(opened: Open) -> None:
    pool = opened(NO_TEXT)
    talk = pool.start(PROMPT, {})
    assert talk.first.result(DEADLINE_S).messages[1:] == [
        {"role": "user", "content": [{"type": "text", "text": "\U0001f600 \ufffd"}]}
    ]
    calls: list[ToolCall | MalformedCall] = [
        ToolCall("echo", {"text": "a\ud83db"}),
        ToolCall("\ud83d", {}),
        MalformedCall("no\udc00"),
    ]
    reply = talk.answer("", calls).result(DEADLINE_S)
    assert reply.calls == 1 and [(one["name"], one["content"]) for one in reply.messages[:1]] == [("echo", "a\ufffdb")]
    assert reply.messages[1]["name"] == "\ufffd" and reply.messages[2]["content"] == "Error: no\ufffd"
    assert said(talk.answer("go", [])) == ["\ufffd and"]
    assert pool.start(PROMPT, {"a": 1}).first.result(DEADLINE_S).error == "ValueError: \ufffd"


def test_conversations_that_run_go_before_those_that_start(opened: Open) -> None:
    pool = opened(OF_ITS_OWN)
    running = pool.start(PROMPT, {})
    running.first.result(DEADLINE_S)
    starting = [pool.start(PROMPT, {"wait": 1}) for _ in range(5)]
    assert said(running.answer("go", [])) == ["go on"]
    assert not starting[-1].first.done()


@pytest.mark.parametrize(
    ("row", "call", "part"),
    [
        ({}, "hang", "took over 10 s and was ended"),
        ({}, "die", "ended with exit code 3"),
        ({}, "interfere", "answered another request and was ended"),
        ({"start": "hang"}, "pid", "took over 10 s and was ended"),
    ],
)
def test_a_lost_process_is_replaced(opened: Open, row: dict[str, Any], call: str, part: str) -> None:
    pool = opened(timeout_s=10)
    bystander = pool.start(PROMPT, {})
    before = said(bystander.answer("", [ToolCall("pid", {})]))[0]
    lost = pool.start(PROMPT, row)
    reply = lost.answer("", [ToolCall(call, {})]).result(DEADLINE_S)
    assert reply.done and reply.error == f"the environment {part}" and reply.messages == []
    outcome = lost.finish().result(DEADLINE_S)
    assert outcome.score is None and outcome.error == reply.error
    assert "another conversation" in (bystander.answer("", []).result(DEADLINE_S).error or "")
    assert "another conversation" in (bystander.finish().result(DEADLINE_S).error or "")
    assert said(pool.start(PROMPT, {}).answer("", [ToolCall("pid", {})]))[0] != before
    assert not Path(f"/proc/{before}").exists()


def test_a_process_that_ends_between_two_calls_is_replaced(opened: Open) -> None:
    pool = opened()
    running = pool.start(PROMPT, {})
    pid = int(said(running.answer("", [ToolCall("pid", {})]))[0])
    os.kill(pid, 9)
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
    assert running.answer("", []).result(DEADLINE_S).error
    assert said(pool.start(PROMPT, {}).first) == ["1 + 2?\n\nGo."]


def test_what_the_users_code_raises_ends_its_conversation_only(opened: Open) -> None:
    pool = opened(timeout_s=10)
    failing, fine, unlucky = (pool.start(PROMPT, {"start": start}) for start in ("raise", 1, 13))
    assert failing.first.result(DEADLINE_S).error == "RuntimeError: no start"
    assert failing.answer("", [ToolCall("pid", {})]).result(DEADLINE_S).error == "RuntimeError: no start"
    assert failing.finish().result(DEADLINE_S).error == "RuntimeError: no start"
    assert unlucky.finish().result(DEADLINE_S).error == "ValueError: unlucky"
    assert fine.finish().result(DEADLINE_S).score == 1.0
    assert "took over 10 s" in (pool.start(PROMPT, {"start": 17}).finish().result(DEADLINE_S).error or "")


def test_closing_ends_what_runs(opened: Open) -> None:
    pool = opened(timeout_s=DEADLINE_S)
    running, other = pool.start(PROMPT, {}), pool.start(PROMPT, {})
    assert said(running.first)
    hanging, waiting = running.answer("", [ToolCall("hang", {})]), running.finish()
    pool.close()
    pool.close()
    for future in (hanging, waiting, other.finish()):
        with pytest.raises(RunError, match="were closed"):
            future.result(DEADLINE_S)
    with pytest.raises(RunError, match="were closed"):
        pool.start(PROMPT, {})


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("class Other: ...", "no 'Own' in"),
        (OWN + "\n    def __init__(self):\n        raise OSError('no disk')\n", "creating it raised OSError: no disk"),
        ("import os\nos._exit(4)\nclass Own: ...", "a process ended with exit code 4 while it loaded it"),
    ],
)
def test_an_environment_that_cannot_be_loaded(opened: Open, source: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        opened(source, workers=2)
