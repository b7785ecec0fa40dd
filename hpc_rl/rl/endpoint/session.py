"""One session: a conversation of an agent with the policy, as messages and as tokens."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpc_rl.data.reading.rows import Message
from hpc_rl.environments.protocol import EpisodeResult
from hpc_rl.rl.converse.partner import Partner
from hpc_rl.rl.converse.transcripts import Conversed
from hpc_rl.rl.endpoint.answers import Answer
from hpc_rl.rl.endpoint.messages import ChatRequest
from hpc_rl.rl.rollout.engine import Completion, Sampling

if TYPE_CHECKING:
    from hpc_rl.rl.endpoint.sessions import Sessions


@dataclass(eq=False, kw_only=True)
class Session(Partner):
    """A response that an agent obtains."""

    sessions: Sessions
    """Those that it belongs to."""
    messages: list[Message]
    """Those of the prompt, from the data."""
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    """Nobody can guess it."""
    owner: str | None = None
    """The key of the agent that has taken it."""
    taken_s: float = 0.0
    """When it was taken, plus the time in which it has waited for the policy."""
    requested_s: float = 0.0
    """When the latest turn was requested."""
    earlier: list[Message] = field(default_factory=list)
    """The messages of the latest request that was answered, and the answer."""
    request: ChatRequest | None = None
    """The latest."""
    reply: Future[Answer] | None = None
    """The answer to it."""
    requested_turns: int = 0
    turn: Completion | None = None
    """The latest."""
    is_full: bool = False
    """Whether the agent wanted to go on when no token was left."""
    outcome: EpisodeResult | None = None
    """None until it has ended."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """A turn was requested, or the session has ended."""

    @property
    def is_busy(self) -> bool:
        """Whether a turn is requested or generated."""
        return self.transcript.turns < self.requested_turns

    def draw(self) -> tuple[int, Sampling]:
        """Return seed and sampling of the next turn. Of a session that has ended without one, this is one token."""
        seed, sampling = super().draw()
        most = sampling.max_new_tokens
        if self.outcome is not None:
            most = 1
        elif self.request is not None and self.request.max_tokens is not None:
            most = min(most, self.request.max_tokens)
        return seed, replace(sampling, max_new_tokens=most)

    async def next(self) -> bool:
        """Wait for the agent. Return whether it has requested a turn; if not, the session has ended."""
        await self.news.wait()
        self.news.clear()
        return self.is_busy

    async def answer(self, turn: Completion) -> bool:
        self.sessions.hear(self, turn)
        return self.outcome is None and await self.next()

    async def end(self) -> Conversed:
        assert self.turn is not None and self.outcome is not None
        finished = self.turn.finished and not self.is_full and self.outcome.error is None
        return self.transcript.joined(finished, self.outcome, self.earlier, self.calls, self.bad_calls)
