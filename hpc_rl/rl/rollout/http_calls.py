"""Calls to an engine that is an HTTP server: JSON in both directions, many at a time."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Generic, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import HTTPHandler, HTTPRedirectHandler, ProxyHandler, Request, build_opener

from hpc_rl.software.proxies import proxies
from hpc_rl.system.listeners import is_own_listener, is_own_peer

T = TypeVar("T")

SHOWN_CHARS = 300
"""Longest part of a server's answer that a message shows."""


class UnreachableError(Exception):
    """A server gave no answer. The message is the reason."""


@dataclass(frozen=True)
class Answer:
    """What a server answered."""

    status: int
    body: bytes
    retry_after: str | None = None
    """The header Retry-After."""

    def table(self) -> dict[str, Any]:
        """Return the object that the answer is; an empty one if it is anything else."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def reason(self) -> str:
        """Return the status and the server's explanation, in one line."""
        found = self.table()
        error = found.get("error") or found.get("message") or found.get("detail")
        told = error.get("message") if isinstance(error, dict) else error
        text = " ".join(str(told or self.body.decode(errors="replace")).split())
        return f"{self.status}: {text[:SHOWN_CHARS]}" if text else str(self.status)


class HttpClient:
    """One server, which several threads may call.

    Args:
        url: address of the server, to which the path of a call is added.
        key: None if it needs none.
        is_own: whether the server is a process of this user on this node, at an IPv4 address. Then nothing is sent
            unless a process of this user listens there, and no proxy is used. Calls to other servers use the proxies of
            the environment (`https_proxy`, `no_proxy`).
    """

    def __init__(self, url: str, key: str | None, is_own: bool) -> None:
        self.url = url.rstrip("/")
        self._key = key
        handlers = (ProxyHandler({}), _OwnServers) if is_own else (ProxyHandler(proxies()),)
        self._opener = build_opener(_NoRedirects, *handlers)

    def get(self, path: str, timeout_s: float | None = None) -> Answer:
        """See `post`."""
        return self._call(Request(self.url + path), timeout_s)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> Answer:
        """Send a JSON object and return the answer, whatever its status is.

        Args:
            timeout_s: time limit of the whole call; None if it may take as long as the server lives.

        Raises:
            UnreachableError: there was no answer in time.
        """
        return self._call(Request(self.url + path, json.dumps(body).encode()), timeout_s)

    def _call(self, request: Request, timeout_s: float | None) -> Answer:
        request.add_header("Content-Type", "application/json")
        if self._key is not None:
            request.add_header("Authorization", f"Bearer {self._key}")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with self._opener.open(request, timeout=timeout_s) as reply:
                return Answer(reply.status, _read(reply, deadline))
        except HTTPError as error:
            with error:
                moved = error.headers.get("Location") if 300 <= error.code < 400 else None
                body = _body_of(error) if moved is None else f"redirected to {moved}".encode()
                return Answer(error.code, body, error.headers.get("Retry-After"))
        except (OSError, HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) else error
            if isinstance(cause, TimeoutError):
                raise UnreachableError(f"no answer within {timeout_s:g} s") from error
            raise UnreachableError(str(cause) or type(cause).__name__) from error


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirection: it would make a GET of a POST, and the key is for one server."""

    def redirect_request(self, *_: Any) -> None: ...


class _OwnConnection(HTTPConnection):
    """Connects only to a process of this user.

    Without the checks, anybody on the node could take the port before the server listens, or after its end, receive the
    key and answer. A server listens once in its life. So if it did before and after the connection was made, no other
    listener has the connection.
    """

    def connect(self) -> None:
        server = (self.host, self.port)
        is_own = is_own_listener(server)
        if is_own:
            super().connect()
            is_own = is_own_listener(server) and is_own_peer(server, self.sock.getsockname())
        if not is_own:
            raise ConnectionRefusedError(f"no process of this user listens at {self.host}:{self.port}")


class _OwnServers(HTTPHandler):
    def http_open(self, request: Request) -> HTTPResponse:
        return self.do_open(_OwnConnection, request)


def _read(reply: Any, deadline: float | None) -> bytes:
    # Each read returns as soon as there is data, so the deadline also stops a server that sends byte by byte.
    parts = []
    while part := reply.read1(1 << 16):
        parts.append(part)
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _body_of(error: HTTPError) -> bytes:
    try:
        return error.read(1 << 16)
    except (OSError, HTTPException):
        return b""


class Calls(Generic[T]):
    """Calls that run in threads, and whose results are taken as they arrive.

    A thread does not keep its process from ending, so a call may wait for a server that never answers.
    """

    def __init__(self) -> None:
        self._results: queue.SimpleQueue[tuple[int, T | BaseException]] = queue.SimpleQueue()
        self._running = 0

    def __len__(self) -> int:
        """Return the number of calls whose result has not been taken."""
        return self._running

    def start(self, number: int, call: Callable[[], T]) -> None:
        """Start a call; the result comes with this number."""
        self._running += 1
        threading.Thread(target=self._work, args=(number, call), daemon=True).start()

    def take(self, timeout_s: float) -> list[tuple[int, T]]:
        """Return the results that there are; if there is none, wait for one at most this long.

        Raises:
            BaseException: what a call raised.
        """
        found: list[tuple[int, T]] = []
        while self._running:
            try:
                number, result = self._results.get(timeout=0 if found else max(timeout_s, 0))
            except queue.Empty:
                break
            self._running -= 1
            if isinstance(result, BaseException):
                raise result
            found.append((number, result))
        return found

    def _work(self, number: int, call: Callable[[], T]) -> None:
        try:
            self._results.put((number, call()))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that takes it
            self._results.put((number, error))
