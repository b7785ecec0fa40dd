"""The endpoint over a real socket, with the client of OpenAI; the turns of the policy follow from the row."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from hpc_rl.rl.converse.partner import turn_seed
from hpc_rl.rl.endpoint import server
from hpc_rl.rl.loop.metrics import conversation_metrics
from tests.rl.endpoint.policy import DEADLINE_S, Loop, client, looping, reward, take

ASK = {"role": "user", "content": "Sum?"}
AND = {"role": "user", "content": "And?"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"x": %d}}</tool_call>'


def chat(of: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return of.chat.completions.create(model="any", messages=messages, **options)


def said(found: Any) -> str:
    return str(found.choices[0].message.content)


def admitted(loop: Loop, name: str) -> str:
    return loop.agents.loop.ask(lambda: loop.agents.sessions.admit(name))


def test_an_agent_with_a_tool_of_its_own(loop: Loop, tokenizer: Any, tmp_path: Path) -> None:
    turns = ["I add." + CALL % 4 + CALL % 5, "again", "It is 9."]
    asked = loop.ask({"turns": turns, "level": 2})
    run = client(tmp_path)
    session = take(run)
    assert session["messages"] == [ASK] and session["row"]["level"] == 2 and session["row"]["answer"] == "3"
    policy = client(tmp_path, session)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *session["messages"]]
    first = chat(policy, messages, tools=[ADD])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.content == "I add."
    assert [json.loads(call.function.arguments)["x"] for call in message.tool_calls] == [4, 5]
    messages.append(message.model_dump())
    messages += [
        {"role": "tool", "content": str(n), "tool_call_id": call.id} for n, call in enumerate(message.tool_calls)
    ]
    second = chat(policy, messages, tools=[ADD])
    assert said(second) == "again" and second.choices[0].finish_reason == "stop"
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens
    messages += [{"role": "assistant", "content": said(second)}, AND]
    assert said(chat(policy, messages, tools=[ADD])) == "It is 9."
    assert reward(run, session, {"score": 0.5, "calls": 2, "note": "x"}) == {
        "id": session["id"],
        "turns": 3,
        "reward": 0.5,
    }

    (found,) = loop.found(asked)
    assert (found.outcome.score, found.outcome.components, found.outcome.error) == (0.5, {"calls": 2.0}, None)
    assert (found.turns, found.calls, found.bad_calls, found.finished) == (3, 2, 0, True)
    said_by_policy = [{"role": "assistant", "content": turn} for turn in turns]
    results = [{"role": "tool", "content": str(n)} for n in (0, 1)]
    whole = [*messages[:2], said_by_policy[0], *results, said_by_policy[1], AND, said_by_policy[2]]
    rendered = tokenizer.apply_chat_template(whole, tools=[ADD], tokenize=False)
    assert tokenizer.decode([*found.prompt, *found.token_ids]) + "\n" == rendered
    assert tokenizer.decode(found.token_ids[found.mask]) == "".join(f"{turn}<|im_end|>" for turn in turns)
    assert found.sampled == sum(map(len, turns)) + 3, "one token for each letter"
    metrics = conversation_metrics([found])
    assert metrics["environment/turns/mean"] == 3 and metrics["environment/tool_calls"] == 2


def test_sessions_are_in_the_order_of_the_data_and_of_the_waves(loop: Loop, tmp_path: Path) -> None:
    asked = loop.ask({"turns": ["a", "b"], "row": 1}, {"turns": ["c", "d"], "row": 2}, n=2, wave=1)
    asked += loop.ask({"turns": ["e", "f"], "row": 0})
    run = client(tmp_path)
    sessions = [take(run) for _ in range(5)]
    assert [session["row"]["row"] for session in sessions] == [0, 1, 1, 2, 2]
    for number, session in reversed([*enumerate(sessions)]):
        policy = client(tmp_path, session)
        answer = said(chat(policy, [ASK]))
        said(chat(policy, [ASK, {"role": "assistant", "content": answer}, AND]))
        reward(run, session, number)
    found = loop.found(asked)
    assert [one.outcome.score for one in found] == [1, 2, 3, 4, 0]
    first = {draws[0][0] for _, draws, _, after in loop.queue.asked if after is None}
    later = {draws[0][0] for _, draws, _, after in loop.queue.asked if after is not None}
    assert first == {0, 1, 10, 11} and later == {turn_seed(seed, 1) for seed in first}
    assert {wave for _, _, wave, _ in loop.queue.asked} == {0, 1}


def test_a_stream_is_the_same_answer(loop: Loop, tmp_path: Path) -> None:
    loop.ask({"turns": ["So." + CALL % 7, "end"]})
    run = client(tmp_path)
    session = take(run)
    policy = client(tmp_path, session)
    options = {"tools": [ADD], "temperature": 0.1, "max_tokens": 300}
    whole = chat(policy, [ASK], **options)
    chunks = [*chat(policy, [ASK], stream=True, stream_options={"include_usage": True}, **options)]
    assert {chunk.id for chunk in chunks} == {whole.id}, "a repeated request gets the same turn"
    assert whole.ignored == chunks[0].ignored == ["temperature"]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "So."
    (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"x": 7}')
    assert chunks[-2].choices[0].finish_reason == "tool_calls" and chunks[-1].usage == whole.usage
    assert len([*chat(policy, [ASK], stream=True, **options)]) == 2
    assert len(loop.queue.asked) == 1


def test_a_client_whose_address_is_fixed_sends_a_header(loop: Loop, tmp_path: Path) -> None:
    loop.ask({"turns": ["end"]})
    run = client(tmp_path)
    assert [model.id for model in run.models.list()] == ["policy"]
    with pytest.raises(openai.BadRequestError, match=r"the request is of no session: take one with POST /v1/sessions"):
        chat(run, [ASK])
    session = take(run)
    assert said(chat(run, [ASK], extra_headers={"X-Session-Id": session["id"]})) == "end"
    assert [model.id for model in client(tmp_path, session).models.list()] == ["policy"]


def test_another_conversation_is_refused_and_the_session_goes_on(
    loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = loop.ask({"turns": ["one", "two"]})
    run = client(tmp_path)
    session = take(run)
    policy = client(tmp_path, session)
    chat(policy, [ASK])
    for messages, problem in (
        ([ASK, {"role": "assistant", "content": "1"}, AND], r"message 2 \(assistant\): the content differs from"),
        ([AND], r"message 1 \(user\): the content differs from character 1 on"),
        ([ASK, {"role": "assistant", "content": "one"}, {"role": "system", "content": "x"}], "only messages of the ro"),
    ):
        with pytest.raises(openai.BadRequestError, match=problem) as refusal:
            chat(policy, messages)
        assert refusal.value.code == "other_messages"
    with pytest.raises(openai.BadRequestError, match=r"other tools than the session's first one"):
        chat(policy, [ASK, {"role": "assistant", "content": "one"}, AND], tools=[ADD])
    assert said(chat(policy, [ASK, {"role": "assistant", "content": "one"}, AND])) == "two"
    reward(run, session, 1)
    (found,) = loop.found(asked)
    assert found.turns == 2 and found.finished
    assert capsys.readouterr().out.count("a request of an agent was refused, the first of its kind: message 2") == 1


def test_requests_that_are_no_agents_are_refused(loop: Loop, tmp_path: Path) -> None:
    loop.ask({"turns": ["end"]}, {"turns": ["end"]})
    session = take(client(tmp_path))
    for key in ("x", json.loads((tmp_path / "endpoint.json").read_text())["api_key"][:-1]):
        with pytest.raises(openai.AuthenticationError, match="the request has no valid key"):
            take(client(tmp_path, api_key=key))
    foreign = admitted(loop, "another")
    for name, key in ((session["id"], foreign), ("x" * 32, None)):
        other = client(
            tmp_path,
            {"base_url": session["base_url"].replace(session["id"], name)},
            **({"api_key": key} if key else {}),
        )
        with pytest.raises(openai.NotFoundError, match=rf"there is no session {name} of this agent"):
            chat(other, [ASK])
    reward(client(tmp_path), session, 0)
    for late in (lambda: chat(client(tmp_path, session), [ASK]), lambda: reward(client(tmp_path), session, 1)):
        with pytest.raises(
            openai.APIStatusError, match=r"has ended: the agent has ended it; take another one"
        ) as ended:
            late()
        assert ended.value.status_code == 410 and ended.value.code == "session_ended"  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings: Not Found"):
        client(tmp_path).post("/embeddings", cast_to=object)


def raw(run_dir: Path, body: bytes, path: str = "/v1/sessions/x/reward", part: str = "") -> tuple[int, Any]:
    """Return the status, and a part of the answer; by default the message of the error."""
    found = json.loads((run_dir / "endpoint.json").read_text())
    connection = http.client.HTTPConnection(urlsplit(found["base_url"]).netloc, timeout=DEADLINE_S)
    connection.request("POST", path, body, {"Authorization": f"Bearer {found['api_key']}"})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    return answer.status, content[part] if part else content["error"]["message"]


def test_bodies_that_are_no_requests(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for body, problem in (
        (b"{", "the body is not valid JSON"),
        (b"[" * 100_000, "the body is not valid JSON"),
        (b"\xff", "the body is not UTF-8"),
        (b"[1]", 'the body has no JSON object: send {"reward": 1.0}'),
        (b'{"score": 1}', "the body has 'score': send"),
        (b'{"reward": "1"}', "the reward: expected a number, got text"),
        (b'{"reward": NaN}', "the reward: expected a finite number"),
        (b'{"reward": {"good": 1}}', 'a dict with the key "score"'),
    ):
        status, message = raw(tmp_path, body)
        assert status == 400 and problem in message, message
    assert raw(tmp_path, b" " * (server.MOST_BYTES + 1)) == (413, "the body has more than 33,554,432 bytes: send less")


def test_too_many_connections_are_closed(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one without a key first."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    found = json.loads((tmp_path / "endpoint.json").read_text())
    address = urlsplit(found["base_url"])
    held: list[socket.socket] = []

    def connect(key: str, status: bytes) -> None:
        held.append(socket.create_connection((address.hostname, address.port), DEADLINE_S))
        held[-1].sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
        assert status in held[-1].recv(1000)

    for _ in range(2):
        connect("x", b"401")
    for stranger in (0, 1):
        connect(found["api_key"], b"200")
        with contextlib.suppress(ConnectionResetError):
            while held[stranger].recv(1000):
                pass
    with socket.create_connection((address.hostname, address.port), DEADLINE_S) as fifth:
        assert fifth.recv(1) == b"", "agents keep their connections"
    for each in held:
        each.close()


def test_strangers_that_leave_are_forgotten(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 4)
    address = urlsplit(json.loads((tmp_path / "endpoint.json").read_text())["base_url"])
    for _ in range(40):
        with socket.create_connection((address.hostname, address.port), DEADLINE_S) as stranger:
            stranger.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            while stranger.recv(1000):
                pass
        assert len(loop.agents.endpoint._strangers) <= 10


def test_connections_without_a_key_are_closed(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads((tmp_path / "endpoint.json").read_text())
    address = urlsplit(found["base_url"])
    models = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port), DEADLINE_S) as friend:
        friend.sendall(models.format(found["api_key"]).encode())
        assert b"200" in friend.recv(100)
        assert not loop.agents.endpoint._strangers
        monkeypatch.setattr(server, "_BODY_S", 0.05)
        with socket.create_connection((address.hostname, address.port), DEADLINE_S) as stranger:
            assert stranger.recv(1) == b""
        friend.sendall(models.format(found["api_key"]).encode())
        assert friend.recv(100)
    assert not loop.agents.endpoint._strangers


def test_limits_of_tokens(tokenizer: Any, tmp_path: Path) -> None:
    with looping(tokenizer, tmp_path, "data.max_prompt_length=60", "data.max_response_length=40") as loop:
        asked = loop.ask({"turns": ["a" * 30, "b" * 30]}, {"turns": ["one", "two"]}, {"turns": ["c" * 90]})
        run = client(tmp_path)
        long, short, endless = [take(run) for _ in range(3)]
        policy = client(tmp_path, long)
        with pytest.raises(
            openai.BadRequestError, match=r"the messages have \d+ tokens, over data.max_prompt_length 60"
        ):
            chat(policy, [{"role": "system", "content": "x" * 100}, ASK])
        first = said(chat(policy, [ASK]))
        with pytest.raises(
            openai.BadRequestError, match=r"has 31 tokens after its prompt, and the new messages have \d+: data.m"
        ):
            chat(policy, [ASK, {"role": "assistant", "content": first}, AND])
        reward(run, long, 1)
        cut = chat(client(tmp_path, short), [ASK], max_tokens=2)
        assert (said(cut), cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("on", "length", 2)
        rest = chat(client(tmp_path, short), [ASK, {"role": "assistant", "content": "on"}, {**AND, "content": "?"}])
        assert said(rest) == "two"
        reward(run, short, 1)
        whole = chat(client(tmp_path, endless), [ASK])
        assert (said(whole), whole.choices[0].finish_reason) == ("c" * 40, "length")
        reward(run, endless, 1)
        found = loop.found(asked)
    assert [one.finished for one in found] == [False, True, False]
    assert [one.outcome.score for one in found] == [1, 1, 1] and found[0].mask is None
    assert tokenizer.decode(found[1].token_ids).startswith("on<|im_end|>\n<|im_start|>user")
    assert max(len(one.token_ids) for one in found) <= 40


def expire(loop: Loop, now_s: float) -> None:
    loop.agents.loop.ask(lambda: loop.agents.sessions.expire(now_s))


def test_sessions_that_have_no_score(tokenizer: Any, tmp_path: Path) -> None:
    with looping(tokenizer, tmp_path, f"agent.timeout_s={DEADLINE_S}") as loop:
        asked = loop.ask(*[{"turns": ["end"]}] * 4)
        run = client(tmp_path)
        no_turn, gives_up, hangs = [take(run) for _ in range(3)]
        chat(client(tmp_path, hangs), [ASK])
        assert reward(run, no_turn, 1)["turns"] == 0
        run.post(f"/sessions/{gives_up['id']}/reward", cast_to=object, body={"error": "no\n disk"})
        now_s = time.monotonic()
        expire(loop, now_s + DEADLINE_S + 10)
        with pytest.raises(openai.APIStatusError, match=r"the agent took more than 600 s"):
            reward(run, hangs, 1)
        assert not asked[3].is_complete
        expire(loop, now_s + 3 * DEADLINE_S)
        found = loop.found(asked)
    assert [one.outcome.error for one in found] == [
        "the agent ended the session without a turn of the policy",
        "no disk",
        "the agent took more than 600 s (agent.timeout_s)",
        "no agent took the session or sent a request within 600 s (agent.timeout_s)",
    ]
    assert [len(one.token_ids) for one in found] == [1, 1, 4, 1] and not any(one.finished for one in found)
    assert conversation_metrics(found)["environment/errors"] == 4


def test_an_end_that_is_repeated_counts_once(loop: Loop, tmp_path: Path) -> None:
    asked = loop.ask({"turns": ["end"]}, {"turns": ["end"]})
    run = client(tmp_path)
    session = take(run)
    chat(client(tmp_path, session), [ASK])
    assert reward(run, session, 1) == reward(run, session, 1) == {"id": session["id"], "turns": 1, "reward": 1}
    assert loop.agents.sessions.rewarded == 1
    foreign = client(tmp_path, api_key=admitted(loop, "another"))
    with pytest.raises(openai.APIStatusError, match="has ended: the agent has ended it"):
        reward(foreign, session, 1)
    gives_up = take(run)
    for _ in range(2):
        run.post(f"/sessions/{gives_up['id']}/reward", cast_to=object, body={"error": "no disk"})
    assert [one.outcome.score for one in loop.found(asked)] == [1, None]


def test_text_that_is_no_unicode_ends_nothing(loop: Loop, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"\\ud83d": "\\ud83d"}}</tool_call>'
    asked = loop.ask({"turns": [call, "end"]})
    run = client(tmp_path)
    session = take(run)
    policy = client(tmp_path, session)
    message = chat(policy, [ASK], tools=[ADD]).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"\ufffd": "\ufffd"}
    result = {"role": "tool", "content": "\ud83d", "tool_call_id": message.tool_calls[0].id}
    body = {"model": "any", "messages": [ASK, message.model_dump(), result], "tools": [ADD]}
    status, found = raw(tmp_path, json.dumps(body).encode(), f"/v1/sessions/{session['id']}/chat/completions", "id")
    assert status == 200 and found.startswith("chatcmpl-")
    reward(run, session, 1)
    assert loop.found(asked)[0].turns == 2


@pytest.mark.parametrize("parameters", [{"x": {"type": 3}}, {"x": {"anyOf": 3}}])
def test_a_turn_that_cannot_be_sent_ends_its_session(tokenizer: Any, tmp_path: Path, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": parameters}}}
    with looping(tokenizer, tmp_path, "agent.tool_format=xml") as loop:
        call = "<function=add><parameter=x>3</parameter></function>"
        asked = loop.ask({"turns": [call]})
        session = take(client(tmp_path))
        with pytest.raises(openai.APIStatusError, match="has ended: the policy's turn cannot be sent: TypeError"):
            chat(client(tmp_path, session), [ASK], tools=[tool])
        (found,) = loop.found(asked)
        assert found.turns == 1 and found.outcome.error.startswith("the policy's turn cannot be sent: TypeError")


def test_ipv6(loop: Loop) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    endpoint = server.Endpoint(loop.agents.sessions, loop.agents.loop, "::1", 600)
    try:
        key = admitted(loop, "an agent")
        run = openai.OpenAI(base_url=endpoint.base_url, api_key=key, timeout=DEADLINE_S)
        assert endpoint.base_url.startswith("http://[::1]:") and [one.id for one in run.models.list()] == ["policy"]
    finally:
        endpoint.close()


def test_a_reward_is_needed_unless_there_is_another(tokenizer: Any, tmp_path: Path) -> None:
    for options, may_lack in (((), False), (("reward.function=exact",), True)):
        with looping(tokenizer, tmp_path, *options) as loop:
            asked = loop.ask({"turns": ["end"]})
            session = take(client(tmp_path))
            chat(client(tmp_path, session), [ASK])
            if not may_lack:
                with pytest.raises(openai.BadRequestError, match=r"the body has no reward, and no reward is set"):
                    reward(client(tmp_path), session, None)
            reward(client(tmp_path), session, None if may_lack else 2)
            assert loop.found(asked)[0].outcome.score == (None if may_lack else 2)


def test_one_request_of_a_session_at_a_time(loop: Loop, tmp_path: Path) -> None:
    asked = loop.ask({"turns": ["one", "two"]})
    run = client(tmp_path)
    session = take(run)
    loop.queue.holds.set()
    with ThreadPoolExecutor(3) as threads:
        same = [threads.submit(chat, client(tmp_path, session), [ASK]) for _ in range(2)]
        while not loop.queue.asked:
            threading.Event().wait(0.01)
        for other in (lambda: chat(client(tmp_path, session), [AND]), lambda: reward(run, session, 1)):
            with pytest.raises(openai.ConflictError, match=r"(is not complete: wait for it|is being generated: wait)"):
                other()
        loop.queue.holds.clear()
        assert [said(each.result(DEADLINE_S)) for each in same] == ["one", "one"]
    reward(run, session, 1)
    assert loop.found(asked)[0].turns == 1 and len(loop.queue.asked) == 1


def test_a_stop_ends_requests_that_wait(tokenizer: Any, tmp_path: Path) -> None:
    with looping(tokenizer, tmp_path) as loop, ThreadPoolExecutor(2) as threads:
        assert (tmp_path / "endpoint.json").stat().st_mode & 0o777 == 0o600
        loop.ask({"turns": ["end"]})
        run = client(tmp_path)
        loop.queue.holds.set()
        turn = threads.submit(chat, client(tmp_path, take(run)), [ASK])
        next_one = threads.submit(take, run)
        while not loop.queue.asked:
            threading.Event().wait(0.01)
        loop.end()
        for each in (turn, next_one):
            with pytest.raises(openai.InternalServerError, match=r"the run stops: it has no more sessions") as stopped:
                each.result(DEADLINE_S)
            assert stopped.value.status_code == 503
        with pytest.raises(openai.APIConnectionError):
            take(run)
    assert not (tmp_path / "endpoint.json").exists()


def test_a_session_that_its_agent_did_not_get_is_open_again(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = json.loads((tmp_path / "endpoint.json").read_text())
    address = urlsplit(found["base_url"])
    with socket.create_connection((address.hostname, address.port), DEADLINE_S) as gone:
        head = f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {found['api_key']}\r\n\r\n"
        gone.sendall(head.encode())
    asked = loop.ask({"turns": ["end"]})
    session = take(client(tmp_path))
    chat(client(tmp_path, session), [ASK])
    reward(client(tmp_path), session, 1)
    assert loop.found(asked)[0].outcome.score == 1


def test_no_session_is_open(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TAKE_S", 0.05)
    assert client(tmp_path).post("/sessions", cast_to=object) is None
