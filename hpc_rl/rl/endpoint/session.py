"""One session: a conversation of an agent with the policy, as messages and as tokens."""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from hpc_rl.data.prompts import Prompt
from hpc_rl.data.rows import Message
from hpc_rl.environments.protocol import Outcome
from hpc_rl.rl.converse.partner import Siblings, turn_seed
from hpc_rl.rl.endpoint.answers import Answer
from hpc_rl.rl.endpoint.messages import ChatRequest
from hpc_rl.rl.rollout.engine import Completion, Sampling
from hpc_rl.rl.converse.transcripts import Transcript


@dataclass(eq=False)
class Session:
    """A response that an agent obtains."""

    found: Siblings
    index: int
    prompt: Prompt
    messages: list[Message]
    """Those of the prompt, from the data."""
    wave: int
    seed: int
    sampling: Sampling
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    """Nobody can guess it."""
    owner: str | None = None
    """The key of the agent that has taken it."""
    taken_s: float = 0.0
    """When it was taken, plus the time in which it has waited for the policy."""
    requested_s: float = 0.0
    """When the latest turn was requested."""
    transcript: Transcript = field(init=False)
    earlier: list[Message] = field(default_factory=list)
    """The messages of the latest request that was answered, and the answer."""
    request: ChatRequest | None = None
    """The latest."""
    reply: Future[Answer] | None = None
    """The answer to it."""
    requested_turns: int = 0
    turn: Completion | None = None
    """The latest."""
    engine: int | None = None
    """The one that generated it."""
    calls: int = 0
    bad_calls: int = 0
    is_full: bool = False
    """Whether the agent wanted to go on when no token was left."""
    outcome: Outcome | None = None
    """None until it has ended."""

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.prompt.token_ids, self.sampling.max_new_tokens)

    @property
    def is_busy(self) -> bool:
        """Whether a turn is requested or generated."""
        return self.transcript.turns < self.requested_turns

    def draw(self) -> tuple[int, Sampling]:
        """Return seed and sampling of the next turn."""
        most = self.transcript.left
        if self.request is not None and self.request.max_tokens is not None:
            most = min(most, self.request.max_tokens)
        return turn_seed(self.seed, self.transcript.turns), replace(self.sampling, max_new_tokens=most)

    def record(self) -> None:
        """Record the response."""
        assert self.turn is not None and self.outcome is not None
        finished = self.turn.finished and not self.is_full and self.outcome.error is None
        own = (self.earlier, self.calls, self.bad_calls)
        self.found.found[self.index] = self.transcript.joined(finished, self.outcome, *own)
