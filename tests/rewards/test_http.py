from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hpc_rl.errors import RunError, UserError
from hpc_rl.node.ray_cluster.environment import ray_environment
from hpc_rl.rewards import http
from tests.rewards.conftest import Open, prompts


class Handler(BaseHTTPRequestHandler):
    """Scores by what the response asks for."""

    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        try:
            self.answer(body["response"])
        finally:
            with self.server.lock:
                self.server.now -= 1

    def answer(self, response: str) -> None:
        if response == "slow":
            self.server.over.wait(600)
        if response == "drop" or (response == "once" and sum(b["response"] == "once" for b in self.server.bodies) == 1):
            self.connection.close()
            return
        text = {"garbage": "<html>", "null": '{"score": null}', "nan": '{"score": NaN}', "other": '{"reward": 1}'}
        text["parts"] = '{"score": 2, "format": 0.5, "note": "ignored"}'
        self.send_response(500 if response == "500" else 200)
        self.end_headers()
        if response == "drip":
            while not self.server.over.wait(0.05):
                self.wfile.write(b" ")
        self.wfile.write(text.get(response, json.dumps({"score": len(response)})).encode())

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.now = self.most = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/score"

    def handle_error(self, *_: Any) -> None:
        pass  # the client leaves first in these tests


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join(600)


def test_the_protocol(opened: Open, server: Server) -> None:
    scorer = opened(url=server.url, kwargs={"style": "short"}, workers=4)
    scores = scorer.score(prompts("x", {"a": 1}, None), ["a", "abc", "é"])
    assert scores.values.tolist() == [1, 3, 1] and scores.errors == []
    assert sorted(server.bodies, key=lambda body: body["prompt"])[1] == {
        "prompt": "question 1",
        "response": "abc",
        "answer": {"a": 1},
        "style": "short",
    }
    many = [str(number) for number in range(100)]
    assert scorer.score(prompts(*many), many).values.tolist() == [len(text) for text in many]
    assert server.most <= 4


def test_further_numbers_of_an_answer_are_components(opened: Open, server: Server) -> None:
    scores = opened(url=server.url).score(prompts("x", "y"), ["parts", "ab"])
    assert scores.values.tolist() == [2, 2]
    assert list(scores.components) == [{"format": 0.5}, {}]


def test_failures_are_scored_on_error(opened: Open, server: Server) -> None:
    bad = {
        "slow": "took over 5 s",
        "drip": "took over 5 s",
        "500": "answered 500 Internal Server Error",
        "garbage": "the endpoint answered b'<html>'; expected {\"score\": number}",
        "null": "expected a number, got NoneType",
        "nan": "expected a finite number, got nan",
        "other": 'expected {"score": number}',
        "drop": "cannot be reached: ",
    }
    responses = [text for name in bad for text in (name, "good")]
    started = time.monotonic()
    scores = opened(url=server.url, timeout_s=5, workers=4).score(prompts(*responses), responses)
    assert time.monotonic() - started < 300
    assert scores.values.tolist() == [4 if response == "good" else -1 for response in responses]
    assert len(scores.errors) == len(bad)
    for index, text in scores.errors:
        assert bad[responses[index]] in text
    asked = [body["response"] for body in server.bodies]
    assert asked.count("drop") == 3 and asked.count("500") == 1


def test_a_lost_connection_is_tried_again(opened: Open, server: Server) -> None:
    assert opened(url=server.url).score(prompts("a"), ["once"]).values.tolist() == [4]
    assert len(server.bodies) == 2


def test_nobody_listens(opened: Open) -> None:
    with Server() as closed:
        url = closed.url
    (error,) = opened(url=url).score(prompts("a"), ["a"]).errors
    assert "cannot be reached" in error[1] and "refused" in error[1]


def test_close_ends_further_attempts(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_PAUSE_S", 600)
    with Server() as closed:
        url = closed.url
    scorer = opened(url=url, timeout_s=600)
    threading.Timer(0.3, scorer.close).start()
    started = time.monotonic()
    with pytest.raises(RunError, match="the scorer was closed while it scored"):
        scorer.score(prompts("a"), ["a"])
    assert time.monotonic() - started < 300


def test_proxies_of_the_environment(opened: Open, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert opened(url=server.url).score(prompts("a"), ["a"]).values.tolist() == [-1]
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert opened(url=server.url).score(prompts("a"), ["a"]).values.tolist() == [1]
    for name, value in ray_environment({"http_proxy": "http://127.0.0.1:9"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("http_proxy")
    assert opened(url=server.url).score(prompts("a"), ["a"]).values.tolist() == [1]
    monkeypatch.delenv("no_proxy")
    assert opened(url=server.url).score(prompts("a"), ["a"]).values.tolist() == [-1]


def test_no_url(opened: Open) -> None:
    with pytest.raises(UserError, match="http://host:port/path"):
        opened(url="node1:8000/score")
