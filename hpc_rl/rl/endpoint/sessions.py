"""The sessions of agents: one for each response of a step.

    waiting --take--> taken --finish, or a failure--> ended
                      | chat   ^
                      v        | answer
                      its turn is requested, and an engine generates it

All methods are called in the event loop of the endpoint (see LoopThread), which also has the coroutine of each session:
it is `converse` with the session as the partner. So nothing here needs a lock, and neither does the tokenizer.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from hpc_rl.data.reading.rows import Message
from hpc_rl.environments.protocol import EpisodeResult
from hpc_rl.environments.tool_calls import ToolCall
from hpc_rl.rl.converse.transcripts import Transcript
from hpc_rl.rl.endpoint.answers import Answer
from hpc_rl.rl.endpoint.messages import ChatRequest, Refusal, new_messages
from hpc_rl.rl.endpoint.rendering import Rendering, one_line
from hpc_rl.rl.endpoint.session import Session
from hpc_rl.rl.rollout.engine import Completion

_MOST_ENDED = 10_000
"""Ended sessions whose ends are remembered, for the answers to late requests."""
_FULL = (
    "the conversation has {tokens} tokens after its prompt, and the new messages have {added}: "
    "data.max_response_length {most} leaves none for another turn; end the session with its reward"
)


@dataclass(frozen=True)
class _Past:
    """A session that has ended."""

    reason: str
    """Why."""
    owner: str | None
    given: EpisodeResult | None
    """What the agent has given; None if it has not ended the session itself."""
    turns: int


class Sessions:
    """All sessions of a run.

    Args:
        most_prompt: data.max_prompt_length.
        timeout_s: agent.timeout_s.
        needs_reward: whether an agent has to give a reward.
    """

    def __init__(self, rendering: Rendering, most_prompt: int, timeout_s: float, needs_reward: bool) -> None:
        self._rendering = rendering
        self._most_prompt, self._timeout_s, self._needs_reward = most_prompt, timeout_s, needs_reward
        self.opened = asyncio.Event()
        """Is set when there are sessions to take, or none ever again; another event takes its place."""
        self._keys: dict[str, str] = {}
        """Who has a key: the key, and a name for messages."""
        self._used: set[str] = set()
        """Keys with which a session was taken."""
        self._waiting: list[tuple[int, int, Session]] = []
        """A heap: wave, number and session."""
        self._opened = 0
        self._taken: dict[str, Session] = {}
        self._past: dict[str, _Past] = {}
        """Sessions that have ended, by their names, oldest first."""
        self._heard_s = time.monotonic()
        """When an agent did something, or might have begun to."""
        self._is_closed = False
        self.rewarded = 0
        """Sessions that agents have ended."""

    def admit(self, name: str) -> str:
        """Return a new key for an agent, whose name messages use."""
        key = secrets.token_hex(32)
        self._keys[key] = name
        return key

    def owner_of(self, authorization: str) -> str:
        """Return the key in the header of a request, in a time that does not depend on the key.

        Raises:
            Refusal: there is none, or no agent has it.
        """
        given = authorization.removeprefix("Bearer ").encode(errors="surrogateescape")
        found = [key for key in self._keys if hmac.compare_digest(given, key.encode())]
        if not found:
            raise _no_key()
        return found[0]

    def dismiss(self, key: str, reason: str) -> bool:
        """Accept no more requests with a key. The sessions of its agent have no score, for this reason.

        Returns:
            whether the agent has taken a session.
        """
        self._keys.pop(key, None)
        for session in [each for each in self._taken.values() if each.owner == key]:
            self._fail(session, reason)
            self._heard_s = time.monotonic()
        has_taken = key in self._used
        self._used.discard(key)
        return has_taken

    def take(self, owner: str) -> Session | None:
        """Give the next open session to an agent. Return None if none is open.

        Raises:
            Refusal: the run has ended, or the agent was dismissed while it waited.
        """
        self._refuse_if_closed()
        if owner not in self._keys:
            raise _no_key()
        if not self._waiting:
            return None
        *_, session = heappop(self._waiting)
        self._heard_s = session.taken_s = time.monotonic()
        session.owner = owner
        self._used.add(owner)
        self._taken[session.name] = session
        return session

    def put_back(self, session: Session) -> None:
        """Open a session again, because its agent did not get it."""
        if self._taken.pop(session.name, None) is not None:  # it may have failed meanwhile
            self._open(session)

    def chat(self, owner: str, name: str, request: ChatRequest) -> Future[Answer]:
        """Request the next turn of the policy. A request that repeats the latest one gets the same answer.

        Raises:
            Refusal: the request does not continue the conversation, or there is no such session.
        """
        session = self._of(owner, name)
        if session.request is None or session.reply is None or not request.repeats(session.request):
            if session.is_busy:
                message = "the session has another request whose answer is not complete: wait for it"
                raise Refusal(message, 409, "busy")
            if session.turn is None:
                self._begin(session, request)
            else:
                self._go_on(session, session.turn, request)
            session.request, session.reply = request, Future()
            session.requested_turns += 1
            session.requested_s = time.monotonic()
            session.news.set()
        self._heard_s = time.monotonic()
        return session.reply

    def finish(self, owner: str, name: str, outcome: EpisodeResult) -> int:
        """End a session with its outcome, and return the number of its turns. The same end may come again: clients
        repeat a request after a lost connection.

        Raises:
            Refusal: a turn is being generated, the reward is missing, or there is no such session.
        """
        past = self._past.get(name)
        if past is not None and (past.owner, past.given) == (owner, outcome):
            self._heard_s = time.monotonic()
            return past.turns
        session, given = self._of(owner, name), outcome
        if session.is_busy and outcome.error is None:
            message = "a turn of the session is being generated: wait for its answer before you end the session"
            raise Refusal(message, 409, "busy")
        if self._needs_reward and outcome.score is None and outcome.error is None:
            message = 'the body has no reward, and no reward is set (reward.*): send {"reward": 1.0}'
            raise Refusal(message, code="no_reward")
        if session.turn is None and outcome.error is None:
            outcome = EpisodeResult(None, error="the agent ended the session without a turn of the policy")
        self.rewarded += outcome.error is None
        self._end(session, outcome, "the agent has ended it", given)
        self._heard_s = time.monotonic()
        return session.transcript.turns

    def open(self, session: Session) -> None:
        """Let agents take a session."""
        if not self._waiting and not self._taken:
            self._heard_s = time.monotonic()
        self._open(session)

    def hear(self, session: Session, turn: Completion) -> None:
        """Answer the request of a session with the turn that was generated for it."""
        self._heard_s = time.monotonic()  # from now on, it is the agent that has to do something
        session.taken_s += self._heard_s - session.requested_s  # the time of the policy is not the agent's
        session.turn = turn
        if session.outcome is not None or session.request is None or session.reply is None or session.reply.done():
            return  # the session or the run has ended meanwhile
        try:
            answer = self._answer(session, session.request, turn)
        except Exception as error:  # noqa: BLE001 - a parser of tool calls may raise anything
            self._fail(session, f"the policy's turn cannot be sent: {one_line(error)}")
            return
        session.earlier = [*session.request.messages, answer.message]
        session.reply.set_result(answer)

    def expire(self, now_s: float) -> None:
        """End the sessions that have taken too long. While one waits for the policy, it does not end."""
        taken = [each for each in self._taken.values() if not each.is_busy]
        late = [each for each in taken if now_s - each.taken_s > self._timeout_s]
        for session in late:
            self._heard_s = now_s
            self._fail(session, f"the agent took more than {self._timeout_s:g} s (agent.timeout_s)")
        if self._waiting and now_s - self._heard_s > self._timeout_s:
            waiting, self._waiting = self._waiting, []
            for *_, session in waiting:
                reason = f"no agent took the session or sent a request within {self._timeout_s:g} s"
                self._fail(session, f"{reason} (agent.timeout_s)")

    def close(self) -> None:
        """Refuse all requests from now on, and those that wait."""
        self._is_closed = True
        for session in self._taken.values():
            if session.reply is not None and not session.reply.done():
                session.reply.set_exception(_run_has_ended())
        self._announce()

    def _open(self, session: Session) -> None:
        session.owner = None
        self._opened += 1
        heappush(self._waiting, (session.wave, self._opened, session))
        self._announce()

    def _announce(self) -> None:
        """Let those look again who wait for a session."""
        opened, self.opened = self.opened, asyncio.Event()
        opened.set()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise _run_has_ended()

    def _of(self, owner: str, name: str) -> Session:
        self._refuse_if_closed()
        session = self._taken.get(name)
        if session is not None and session.owner == owner:
            return session
        if (past := self._past.get(name)) is not None:
            raise Refusal(f"session {name} has ended: {past.reason}; take another one", 410, "session_ended")
        message = f"there is no session {name} of this agent: take one with POST /v1/sessions"
        raise Refusal(message, 404, "session_not_found")

    def _begin(self, session: Session, request: ChatRequest) -> None:
        """Set the prompt of the conversation."""
        ids = session.prompt.token_ids
        if request.tools or request.messages != session.messages:
            ids = np.array(self._rendering.prompt_ids(request.messages, request.tools), np.int32)
        if len(ids) > self._most_prompt:
            raise Refusal(
                f"the messages have {len(ids)} tokens, over data.max_prompt_length {self._most_prompt}: shorten them, "
                "or raise it",
                code="context_length_exceeded",
            )
        session.transcript = Transcript(ids, session.sampling.max_new_tokens)

    def _go_on(self, session: Session, turn: Completion, request: ChatRequest) -> None:
        """Add the messages after the latest turn."""
        assert session.request is not None
        if request.tools != session.request.tools:
            raise Refusal(
                "the request has other tools than the session's first one, which are part of the prompt: send the same",
                code="other_messages",
            )
        new = new_messages(session.earlier, request.messages)
        added = self._rendering.added_ids(turn, _with_names(new, session.earlier), request.tools)
        if not session.transcript.add_observation(added):
            session.is_full = True
            most = session.sampling.max_new_tokens
            message = _FULL.format(tokens=most - session.transcript.left, added=len(added), most=most)
            raise Refusal(message, code="context_length_exceeded")
        session.is_full = False

    def _answer(self, session: Session, request: ChatRequest, turn: Completion) -> Answer:
        number = session.transcript.turns
        thinking, text, calls = self._rendering.read(turn, request.tools)
        made = [call for call in calls if isinstance(call, ToolCall)]
        message: Message = {"role": "assistant", "content": text}
        if made:
            message["tool_calls"] = [
                # Some chat templates demand nine characters.
                {"id": f"c{session.calls + index:08d}", "type": "function", "function": _function(call)}
                for index, call in enumerate(made)
            ]
        session.calls, session.bad_calls = session.calls + len(made), session.bad_calls + len(calls) - len(made)
        before = len(session.transcript.ids()) - len(turn.token_ids)
        name = f"chatcmpl-{session.name}-{number}"
        return Answer(name, int(time.time()), message, thinking, turn.finished, before, len(turn.token_ids))

    def _fail(self, session: Session, reason: str) -> None:
        self._end(session, EpisodeResult(None, error=reason), reason)

    def _end(self, session: Session, outcome: EpisodeResult, reason: str, given: EpisodeResult | None = None) -> None:
        self._taken.pop(session.name, None)
        self._past[session.name] = _Past(reason, session.owner, given, session.transcript.turns)
        if len(self._past) > _MOST_ENDED:
            del self._past[next(iter(self._past))]
        session.outcome = outcome
        if session.reply is not None and not session.reply.done():
            message = f"session {session.name} has ended: {reason}; take another one"
            session.reply.set_exception(Refusal(message, 410, "session_ended"))
        session.news.set()


def _no_key() -> Refusal:
    message = "the request has no valid key: send the header 'Authorization: Bearer KEY', with OPENAI_API_KEY"
    return Refusal(message, 401, "invalid_api_key")


def _run_has_ended() -> Refusal:
    return Refusal("the run stops: it has no more sessions", 503, "run_ended")


def _function(call: ToolCall) -> dict[str, object]:
    return {"name": call.name, "arguments": call.arguments}


def _with_names(messages: list[Message], earlier: list[Message]) -> list[Message]:
    """Return messages whose results of tools have the names of these, which some chat templates render."""
    names = {call["id"]: call["function"]["name"] for message in earlier for call in message.get("tool_calls", [])}
    return [
        {"name": names[message["tool_call_id"]], **message} if message.get("tool_call_id") in names else message
        for message in messages
    ]
