from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.request import ProxyHandler

import pytest

from hpc_rl.rl.rollout.http_calls import Calls, HttpAnswer, HttpClient, UnreachableError
from tests.http_server import serving

DEADLINE_S = 600
DIRECT = ProxyHandler({})


def handler(answer: Callable[[BaseHTTPRequestHandler, bytes], None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self, self.rfile.read(int(self.headers["Content-Length"])))

        do_GET = lambda self: answer(self, b"")  # noqa: E731

        def log_message(self, *_: Any) -> None: ...

    return Handler


def send(request: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.wfile.write(body)


@contextmanager
def answering(asked: list[str]) -> Iterator[str]:
    """Answer {} to every request, and note its path."""

    def answer(request: BaseHTTPRequestHandler, _: bytes) -> None:
        asked.append(request.path)
        send(request, 200, b"{}")

    with serving(handler(answer)) as url:
        yield url


def test_a_call_sends_an_object_and_returns_the_answer() -> None:
    def echo(request: BaseHTTPRequestHandler, body: bytes) -> None:
        found = {"path": request.path, "body": json.loads(body or b"null"), "key": request.headers["Authorization"]}
        send(request, 200, json.dumps(found).encode())

    with serving(handler(echo)) as url:
        client = HttpClient(f"{url}/v1/", "secret", DIRECT)
        expected = {"path": "/v1/generate", "body": {"a": [1]}, "key": "Bearer secret"}
        assert client.post("/generate", {"a": [1]}, DEADLINE_S).table() == expected
        assert client.get("/health").table() == {"path": "/v1/health", "body": None, "key": "Bearer secret"}
        assert HttpClient(url, None, DIRECT).get("/").table()["key"] is None


def test_an_error_is_an_answer() -> None:
    def refuse(request: BaseHTTPRequestHandler, _: bytes) -> None:
        send(request, 429, b'{"error": {"message": "too\\nmany"}}', Retry_After="3")

    with serving(handler(refuse)) as url:
        answer = HttpClient(url, None, DIRECT).post("/", {})
    assert (answer.status, answer.retry_after, answer.reason()) == (429, "3", "429: too many")


@pytest.mark.parametrize(
    "body, reason",
    [
        (b"", "500"),
        (b"<html>\n no </html>", "500: <html> no </html>"),
        (b'{"error": "Unauthorized"}', "500: Unauthorized"),
        (b'{"message": "no room"}', "500: no room"),
        (b'{"detail": "no room"}', "500: no room"),
        (b"[1]", "500: [1]"),
        (b"x" * 1000, "500: " + "x" * 300),
    ],
)
def test_the_reason_is_one_line(body: bytes, reason: str) -> None:
    assert HttpAnswer(500, body).reason() == reason


def test_an_answer_that_is_no_object_is_an_empty_table() -> None:
    assert [HttpAnswer(200, body).table() for body in (b"[1]", b"\xff", b"", b'{"a": 1}')] == [{}, {}, {}, {"a": 1}]


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_another_server_is_not_called_with_the_key(status: int) -> None:
    asked: list[str] = []

    with (
        answering(asked) as other,
        serving(handler(lambda request, _: send(request, status, b"", Location=other))) as url,
    ):
        client = HttpClient(url, "secret", DIRECT)
        for answer in (client.get("/"), client.post("/", {})):
            assert (answer.status, answer.reason()) == (status, f"{status}: redirected to {other}")
    assert asked == []


def test_a_server_is_called_by_the_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering([]) as url:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert HttpClient(url, None, DIRECT).get("/").status == 200
        with pytest.raises(UnreachableError, match="refused"):
            HttpClient(url, None).get("/", DEADLINE_S)


def test_a_server_that_is_silent_or_slow_is_unreachable() -> None:
    over = threading.Event()

    def drip(request: BaseHTTPRequestHandler, _: bytes) -> None:
        if request.path == "/silent":
            over.wait(DEADLINE_S)
        request.send_response(200)
        request.end_headers()
        while not over.wait(0.01):
            try:
                request.wfile.write(b" ")
            except OSError:
                return

    with serving(handler(drip)) as url:
        client = HttpClient(url, None, DIRECT)
        for path in ("/silent", "/slow"):
            with pytest.raises(UnreachableError, match=r"^no answer within 0\.2 s$"):
                client.post(path, {}, 0.2)
        over.set()
    with pytest.raises(UnreachableError, match="refused"):
        client.post("/", {}, DEADLINE_S)


def test_calls_return_as_they_are_ready() -> None:
    """One of them waits until the others have been taken."""
    calls: Calls[int] = Calls()
    last = threading.Event()
    for number in range(9):
        calls.start(number, lambda number=number: 10 * number)  # type: ignore[misc]
    calls.start(9, lambda: 90 if last.wait(DEADLINE_S) else -1)
    found: dict[int, int] = {}
    while len(found) < 9:
        found.update(calls.take(DEADLINE_S))
    assert found == {number: 10 * number for number in range(9)} and len(calls) == 1
    assert calls.take(0) == []
    last.set()
    assert calls.take(DEADLINE_S) == [(9, 90)] and len(calls) == 0
    began = time.monotonic()
    assert calls.take(DEADLINE_S) == [] and time.monotonic() - began < DEADLINE_S / 2


def test_what_a_call_raises_is_raised_where_it_is_taken() -> None:
    calls: Calls[int] = Calls()
    calls.start(1, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        calls.take(DEADLINE_S)
    assert len(calls) == 0
