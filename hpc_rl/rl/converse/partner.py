"""A response with several turns: one coroutine, `converse`, in which the policy and a partner take turns.

The partner is an environment with its tools, or an agent. Invariants:

- Every response that is requested is recorded exactly once, in the place of its draw, or the `turn` of its Respondent
  raises. What goes wrong in a conversation is the error of its own outcome. Only what ends the run is raised.
- A response depends on its prompt, its draw, the weights, and what its partner answers. It does not depend on the order
  in which conversations go on, or on those beside it. So batches are equal for the same seed and weights.
- The transcript grows by exactly the tokens that the policy sampled, and by what the partner adds between its turns.
- Each later turn goes to the engine of the turn before, which has the beginning of the conversation in its cache.
- No conversation waits for the partner or the engine of another one, after its siblings have begun.
- Coroutines and partners belong to one event loop. The request queue and what is recorded belong to the thread that
  calls `turn`, which may change between two calls. TurnRequests is all that they share.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import numpy as np

from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.converse.transcripts import Conversed, Transcript
from hpc_rl.rl.converse.turns import Turn, TurnRequests
from hpc_rl.rl.rollout.engine import Completion, Sampling


@dataclass(eq=False, kw_only=True)
class Partner(ABC):
    """What converses with the policy in one response."""

    prompt: Prompt
    wave: int
    seed: int
    sampling: Sampling
    transcript: Transcript = field(init=False)
    calls: int = 0
    """Tool calls that were made."""
    bad_calls: int = 0

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.prompt.token_ids, self.sampling.max_new_tokens)

    def draw(self) -> tuple[int, Sampling]:
        """Return seed and sampling of the next turn."""
        return turn_seed(self.seed, self.transcript.turns), replace(self.sampling, max_new_tokens=self.transcript.left)

    @abstractmethod
    async def answer(self, turn: Completion) -> bool:
        """Answer the latest turn of the transcript.

        Returns:
            whether another turn follows. The transcript then has all that precedes it.
        """

    @abstractmethod
    async def end(self) -> Conversed:
        """Return the conversation as one response. This is called once, after `answer` has returned False."""


@dataclass
class Siblings:
    """The conversations about one prompt that were requested together; see Responses."""

    size: int
    found: dict[int, Conversed] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all have ended."""
        return len(self.found) == self.size

    def completions(self) -> list[Completion]:
        """Return them in the order in which they were requested."""
        return [self.found[index] for index in range(self.size)]

    def record(self, index: int, found: Conversed) -> None:
        """Record a conversation that has ended."""
        self.found[index] = found


async def converse(partner: Partner, turns: TurnRequests, first: asyncio.Future[Turn] | None = None) -> Conversed:
    """Let the policy and a partner take turns until the partner ends the conversation.

    Args:
        first: the first turn, if it was requested together with those of siblings.
    """
    completion, engine = await (first or _request(partner, turns, None))
    partner.transcript.add_turn(completion)
    while await partner.answer(completion):
        completion, engine = await _request(partner, turns, engine)
        partner.transcript.add_turn(completion)
    return await partner.end()


def _request(partner: Partner, turns: TurnRequests, engine: int | None) -> asyncio.Future[Turn]:
    prompt = replace(partner.prompt, token_ids=partner.transcript.ids())
    (turn,) = turns.request(prompt, [partner.draw()], partner.wave, engine)
    return turn


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: that of the response for the first one, and one that follows from it for others."""
    return seed if turn == 0 else int(np.random.default_rng([seed, turn]).integers(2**62))
