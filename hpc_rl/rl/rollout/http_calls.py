"""Calls to an engine that is an HTTP server: JSON in both directions, many at a time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Generic, TypeVar
from urllib.error import URLError
from urllib.request import BaseHandler, HTTPErrorProcessor, ProxyHandler, Request, build_opener

from hpc_rl.software.proxies import proxies

T = TypeVar("T")

SHOWN_CHARS = 300
"""Longest part of a server's answer that a message shows."""


class UnreachableError(Exception):
    """A server gave no answer. The message is the reason."""


@dataclass(frozen=True)
class HttpAnswer:
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
        handlers: how urllib connects to the server; by default, through the proxies of the environment (`https_proxy`,
            `no_proxy`).
    """

    def __init__(self, url: str, key: str | None, *handlers: BaseHandler) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._opener = build_opener(_EveryAnswer, *(handlers or (ProxyHandler(proxies()),)))

    def get(self, path: str, timeout_s: float | None = None) -> HttpAnswer:
        """See `post`."""
        return self._call(Request(self.url + path), timeout_s)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> HttpAnswer:
        """Send a JSON object and return the answer, whatever its status is.

        Args:
            timeout_s: time limit of the whole call; None if it may take as long as the server lives.

        Raises:
            UnreachableError: there was no answer in time.
        """
        return self._call(Request(self.url + path, json.dumps(body).encode()), timeout_s)

    def _call(self, request: Request, timeout_s: float | None) -> HttpAnswer:
        request.add_header("Content-Type", "application/json")
        if self._key is not None:
            request.add_header("Authorization", f"Bearer {self._key}")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with self._opener.open(request, timeout=timeout_s) as reply:
                moved = reply.headers.get("Location") if 300 <= reply.status < 400 else None
                body = _read(reply, deadline) if moved is None else f"redirected to {moved}".encode()
                return HttpAnswer(reply.status, body, reply.headers.get("Retry-After"))
        except (OSError, HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) else error
            if isinstance(cause, TimeoutError):
                raise UnreachableError(f"no answer within {timeout_s:g} s") from error
            raise UnreachableError(str(cause) or type(cause).__name__) from error


class _EveryAnswer(HTTPErrorProcessor):
    """Returns errors as answers, and follows no redirection: it would make a GET of a POST, and send the key on."""

    def http_response(self, request: Request, response: Any) -> Any:
        return response

    https_response = http_response


def _read(reply: Any, deadline: float | None) -> bytes:
    # Each read returns as soon as there is data, so the deadline also stops a server that sends byte by byte.
    parts = []
    while part := reply.read1(1 << 16):
        parts.append(part)
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


class Calls(Generic[T]):
    """Calls that run in threads, and whose results are taken as they arrive.

    A thread does not keep its process from ending, so a call may wait for a server that never answers.
    """

    def __init__(self) -> None:
        self._running: dict[Future[T], int] = {}

    def __len__(self) -> int:
        """Return the number of calls whose result has not been taken."""
        return len(self._running)

    def start(self, number: int, call: Callable[[], T]) -> None:
        """Start a call; the result comes with this number."""
        future: Future[T] = Future()
        self._running[future] = number
        threading.Thread(target=_work, args=(future, call), daemon=True).start()

    def take(self, timeout_s: float) -> list[tuple[int, T]]:
        """Return the results that there are; if there is none, wait for one at most this long.

        Raises:
            BaseException: what a call raised.
        """
        done, _ = wait(self._running, max(timeout_s, 0), FIRST_COMPLETED)
        return [(self._running.pop(future), future.result()) for future in done]


def _work(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised in the thread that takes it
        future.set_exception(error)
