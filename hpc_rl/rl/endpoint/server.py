"""The HTTP server that agents talk to. It runs in the event loop of the sessions.

GET   /v1/models                            the policy
POST  /v1/sessions                          take the next session; null if none is open yet
POST  /v1/sessions/NAME/chat/completions    the next turn of the policy (/v1/sessions/NAME is a base_url of its own)
POST  /v1/sessions/NAME/reward              end the session
POST  /v1/chat/completions                  the same as above, with the session in the header X-Session-Id
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from hpc_rl.environments.protocol import EpisodeResult, readable
from hpc_rl.errors import RunError, UserError
from hpc_rl.rewards.number import split_reward
from hpc_rl.rl.converse.loop_thread import LoopThread
from hpc_rl.rl.endpoint.answers import MODEL, models
from hpc_rl.rl.endpoint.messages import Refusal, read_chat
from hpc_rl.rl.endpoint.session import Session
from hpc_rl.rl.endpoint.sessions import Sessions

SESSION_HEADER = "X-Session-Id"
TAKE_S = 30.0
"""Longest wait for a session that is open."""
MOST_BYTES = 32 << 20
"""Longest body of a request."""
MOST_CONNECTIONS = 4096
_BODY_S = 60.0
"""Time limit for the body of a request, and for the first request with a valid key on a connection."""
_MARGIN_S = 60.0
"""After agent.timeout_s, a session ends at the next turn of the loop. An answer is awaited for so much longer."""
_START_S = 60.0
_SHUTDOWN_S = 5.0


class Endpoint:
    """The server.

    Args:
        loop: where it runs, with the sessions.
        address: where it listens.
        timeout_s: agent.timeout_s.

    Raises:
        UserError: it cannot listen there.
    """

    def __init__(self, sessions: Sessions, loop: LoopThread, address: str, timeout_s: float) -> None:
        self._sessions, self._loop, self._timeout_s = sessions, loop, timeout_s
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._socket = socket.create_server((address, 0), family=family, backlog=MOST_CONNECTIONS)
        except OSError as error:
            raise UserError(
                f"agent.endpoint: this node cannot listen on {address}: {error.strerror}; set agent.endpoint=loopback"
            ) from error
        host = f"[{address}]" if ":" in address else address
        self.base_url = f"http://{host}:{self._socket.getsockname()[1]}/v1"
        self._noted: set[str] = set()
        """Codes of refusals that were printed."""
        self._strangers: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """Connections without a valid key so far, each with the timer that closes it."""
        try:
            self._server, self._runner = loop.start(self._open()).result(_START_S)
        except TimeoutError as error:
            raise RunError(f"agent.endpoint: the server did not start within {_START_S:g} s") from error

    def close(self) -> None:
        """Close all connections, once the answers to open requests are sent."""
        with contextlib.suppress(TimeoutError):
            self._loop.start(self._end()).result(2 * _SHUTDOWN_S)

    async def _open(self) -> tuple[asyncio.Server, web.AppRunner]:
        """Start to listen."""
        app = web.Application(middlewares=[self._guard], client_max_size=MOST_BYTES)
        for prefix in ("/v1", "/v1/sessions/{name}"):
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
        app.router.add_post("/v1/sessions", self._take)
        app.router.add_post("/v1/sessions/{name}/reward", self._finish)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        protocols = runner.server
        assert protocols is not None
        loop = asyncio.get_running_loop()

        def connect() -> asyncio.Protocol:
            if len(protocols.connections) >= MOST_CONNECTIONS and not self._close_oldest_stranger():
                return _Full()
            if len(self._strangers) > 2 * MOST_CONNECTIONS:
                self._forget_strangers()
            protocol = protocols()
            self._strangers[protocol] = loop.call_later(_BODY_S, self._close_stranger, protocol)
            return protocol

        return await loop.create_server(connect, sock=self._socket), runner

    async def _end(self) -> None:
        self._server.close()
        await self._runner.cleanup()

    def _close_stranger(self, protocol: web.RequestHandler) -> None:
        """Close a connection, although its client may not read what was sent to it."""
        self._strangers.pop(protocol).cancel()
        if isinstance(protocol.transport, asyncio.WriteTransport):
            protocol.transport.abort()

    def _close_oldest_stranger(self) -> bool:
        """Make room for a connection. Return whether there was a stranger's."""
        self._forget_strangers()
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._close_stranger(oldest)
        return oldest is not None

    def _forget_strangers(self) -> None:
        """Forget the connections that were closed."""
        for protocol in [each for each in self._strangers if each.transport is None]:
            self._strangers.pop(protocol).cancel()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check who sends a request, and answer what is refused in OpenAI's format."""
        try:
            self._owner(request)
            if (timer := self._strangers.pop(request.protocol, None)) is not None:
                timer.cancel()
            return await handler(request)
        except Refusal as error:
            refusal = error
        except web.HTTPRequestEntityTooLarge:
            message = f"the body has more than {MOST_BYTES:,} bytes: send less"
            refusal = Refusal(message, 413, "too_large")
        except web.HTTPException as error:
            refusal = Refusal(f"{request.method} {request.path}: {error.reason}", error.status, "not_found")
        if refusal.code not in self._noted and refusal.status < 500:
            self._noted.add(refusal.code)
            print(f"warning: a request of an agent was refused, the first of its kind: {refusal}", flush=True)
        return web.json_response(refusal.body(), status=refusal.status)

    def _owner(self, request: web.Request) -> str:
        return self._sessions.owner_of(request.headers.get("Authorization", ""))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(models())

    async def _take(self, request: web.Request) -> web.Response:
        """Give the next session, as soon as one is open; null after TAKE_S."""
        end_s = time.monotonic() + TAKE_S
        while True:
            opened = self._sessions.opened
            session = self._sessions.take(self._owner(request))
            left_s = end_s - time.monotonic()
            if session is not None or left_s <= 0 or _is_gone(request):
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(opened.wait(), min(left_s, 1.0))
        if session is not None and _is_gone(request):
            self._sessions.put_back(session)
            session = None
        return web.json_response(session and self._described(session), dumps=_dumps)

    def _described(self, session: Session) -> dict[str, Any]:
        return {
            "id": session.name,
            "base_url": f"{self.base_url}/sessions/{session.name}",
            "model": MODEL,
            "messages": session.messages,
            "row": session.prompt.row,
        }

    async def _chat(self, request: web.Request) -> web.Response:
        """Answer with the next turn of the policy."""
        name = request.match_info.get("name") or request.headers.get(SESSION_HEADER)
        if name is None:
            raise Refusal(
                "the request is of no session: take one with POST /v1/sessions, and send requests to its base_url, or "
                f"with its id in the header {SESSION_HEADER}",
                code="no_session",
            )
        asked = read_chat(await _body(request))
        reply = asyncio.wrap_future(self._sessions.chat(self._owner(request), name, asked))
        try:  # the same turn may be awaited by a repeated request
            answer = await asyncio.wait_for(asyncio.shield(reply), self._timeout_s + _MARGIN_S)
        except TimeoutError as error:
            raise Refusal("the policy has not answered within agent.timeout_s", 504, "timeout") from error
        if asked.streams:
            return web.Response(text=answer.events(asked), content_type="text/event-stream")
        return web.json_response(answer.body(asked), dumps=_dumps)

    async def _finish(self, request: web.Request) -> web.Response:
        """End a session."""
        outcome = read_outcome(await _body(request))
        name = request.match_info["name"]
        turns = self._sessions.finish(self._owner(request), name, outcome)
        return web.json_response({"id": name, "turns": turns, "reward": outcome.score})


class _Full(asyncio.Protocol):
    """A connection that is closed at once, because there are too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def read_outcome(body: object) -> EpisodeResult:
    """Read the end of a session: {"reward": 1.0}, {"reward": {"score": 1.0, "NAME": 0.5}} or {"error": "why"}.

    Raises:
        Refusal: it has another form, or the reward is no finite number.
    """
    if not isinstance(body, dict) or (other := {*body} - {"reward", "error"}):
        found = "no JSON object" if not isinstance(body, dict) else f"{min(other)!r}"
        message = f'the body has {found}: send {{"reward": 1.0}}, or {{"error": "why there is none"}}'
        raise Refusal(message, code="no_reward")
    if body.get("error") is not None:
        return EpisodeResult(None, error=" ".join(str(body["error"]).split()) or "the agent reports an error")
    if body.get("reward") is None:
        return EpisodeResult(None)
    try:
        return EpisodeResult(*split_reward(body["reward"]))
    except ValueError as error:
        raise Refusal(f"the reward: {error}", code="no_reward") from error


async def _body(request: web.Request) -> object:
    """Return the JSON in the body of a request."""
    try:
        text = await asyncio.wait_for(request.text(), _BODY_S)
    except TimeoutError as error:
        raise Refusal(f"the body did not arrive within {_BODY_S:g} s", 408, "timeout") from error
    except (UnicodeDecodeError, LookupError) as error:
        raise Refusal("the body is not UTF-8", code="bad_json") from error
    try:
        return readable(json.loads(text or "null"))
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not valid JSON ({error})", code="bad_json") from error


def _is_gone(request: web.Request) -> bool:
    """Return whether the connection of a request is closed."""
    return request.transport is None or request.transport.is_closing()


def _dumps(value: object) -> str:
    """Return JSON. A row may have values that JSON lacks, such as dates."""
    return json.dumps(value, ensure_ascii=False, default=str)
