"""Responses with several turns: the model writes, an environment answers, and the model goes on.

    asked = conversations.ask(prompt, draws)     # waits until there is room
    while not asked.is_complete:
        conversations.turn(timeout_s)            # engines generate turns, while environments answer others
    asked.completions()                          # each conversation as one response

Each response is one coroutine, `_converse`, which awaits in turn the model and its environment. Invariants:

- Every response that is requested is recorded exactly once, in the place of its draw, or `turn` raises. What goes wrong
  in a conversation is the error of its own outcome. Only what ends the run is raised.
- A response depends on its prompt, its draw, the weights, and what its environment answers. It does not depend on the
  order in which conversations go on, or on those beside it. So batches are equal for the same seed and weights.
- Siblings, which are the responses to one prompt, begin together. Those with equal prompts request their first turns
  together, because they share an engine. Each later turn goes to the engine of the turn before.
- No conversation waits for the environment or the engine of another one, after its siblings have begun.
- Each conversation that an environment has begun is finished once, also if it fails.
- No more conversations are open than can be useful: those that fill the engines, and one for each process of the
  environment, which makes one call at a time. The others wait, in the order in which engines would get their prompts.
  Those of later waves do not count: validation starts at once, however many conversations of a training are open.
- Coroutines and the environment belong to the event loop, everything else to the thread that calls `turn`, which may
  change between two calls (see TurnRequests).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hpc_rl.data.prompts import Prompt
from hpc_rl.data.rows import Message, to_prompt
from hpc_rl.environments.pool import Conversation
from hpc_rl.environments.protocol import SEED, Outcome, Reply
from hpc_rl.errors import UserError
from hpc_rl.rl.converse.environment import Environment
from hpc_rl.rl.converse.transcripts import Conversed, Transcript
from hpc_rl.rl.converse.turns import Turn, TurnRequests
from hpc_rl.rl.rollout.engine import Completion, Sampling
from hpc_rl.rl.rollout.request_queue import TURN_S, RequestQueue
from hpc_rl.rl.rollout.respondent import Samplings

if TYPE_CHECKING:
    from hpc_rl.rl.cluster import DriverConfig


@dataclass
class Siblings:
    """The conversations about one prompt that were requested together."""

    size: int
    found: dict[int, Conversed] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all have ended."""
        return len(self.found) == self.size

    def completions(self) -> list[Completion]:
        """Return them in the order in which they were requested."""
        return [self.found[index] for index in range(self.size)]


@dataclass(order=True)
class _Group:
    """A request for siblings, in the order in which these start; compare Dispatch."""

    wave: int
    shortness: int
    """Minus the tokens of the prompt."""
    number: int
    prompt: Prompt = field(compare=False)
    draws: Samplings = field(compare=False)
    siblings: Siblings = field(compare=False)


@dataclass
class _Opening:
    """How a conversation begins."""

    transcript: Transcript
    messages: list[Message]
    """What the transcript holds, as text."""
    error: str | None
    """Why it cannot begin, if it cannot."""


class Conversations:
    """What responds to prompts with conversations; see Respondent. The queue generates the turns of the model."""

    def __init__(self, queue: RequestQueue, environment: Environment, config: DriverConfig) -> None:
        self._queue, self._environment, self._config = queue, environment, config
        self._turns = TurnRequests(queue, environment.loop)
        self._waiting: list[_Group] = []
        """A heap."""
        self._asked = 0
        self._open: Counter[int] = Counter()
        """Number of conversations that have started and not ended, by wave."""

    def ask(self, prompt: Prompt, draws: Samplings, wave: int = 0) -> Siblings:
        """See Respondent."""
        siblings = Siblings(len(draws))
        self._asked += 1
        heapq.heappush(self._waiting, _Group(wave, -len(prompt.token_ids), self._asked, prompt, draws, siblings))
        return siblings

    def turn(self, timeout_s: float) -> None:
        """See Respondent.

        Raises:
            UserError: an engine refused a request.
            RunError: too many engines have died, or the environment cannot be loaded again.
        """
        self._start()
        self._turns.advance(timeout_s)

    def wait(self, asked: Sequence[Siblings]) -> None:
        """See Respondent."""
        while not all(one.is_complete for one in asked):
            self.turn(TURN_S)

    def pause(self) -> None:
        """See Respondent. Environments may go on with what they do."""
        self._queue.pause()

    def _start(self) -> None:
        """Start conversations that wait, as many as there is room for."""
        most = self._queue.capacity + self._environment.processes.workers
        while self._waiting and sum(self._open[wave] for wave in self._open if wave <= self._waiting[0].wave) < most:
            group = heapq.heappop(self._waiting)
            self._open[group.wave] += len(group.draws)
            self._turns.start(self._respond(group))

    def _record(self, group: _Group, index: int, found: Conversed) -> None:
        """Record a conversation that has ended, and start others in its room."""
        group.siblings.found[index] = found
        self._open[group.wave] -= 1
        if not self._open[group.wave]:
            del self._open[group.wave]  # waves are steps, and a run has many
        self._start()

    async def _respond(self, group: _Group) -> None:
        """Let siblings begin together, and let each converse."""
        messages, _ = to_prompt(group.prompt.row, self._config.data, "the data")
        # Responses to one prompt are compared with each other, so that their environments are equal.
        row = {SEED: group.draws[0][0] % 2**31} | group.prompt.row
        talks = [self._environment.processes.start(messages, row) for _ in group.draws]
        replies = await asyncio.gather(*(asyncio.wrap_future(talk.first) for talk in talks))
        most = [sampling.max_new_tokens for _, sampling in group.draws]
        openings = [
            self._opening(group.prompt, messages, reply, limit) for reply, limit in zip(replies, most, strict=True)
        ]
        turns = self._first_turns(group, openings)
        await asyncio.gather(
            *(
                self._converse(group, index, talk, opening, turns[index])
                for index, (talk, opening) in enumerate(zip(talks, openings, strict=True))
            )
        )

    def _opening(self, prompt: Prompt, messages: list[Message], reply: Reply, most: int) -> _Opening:
        """Return how a conversation about a prompt with these messages begins after the environment's `reset`."""
        ids, error = prompt.token_ids, reply.error
        if error is None:
            try:
                ids = self._environment.prompt_ids(prompt, messages, reply.messages)
            except Exception as problem:  # noqa: BLE001 - a template or a tokenizer may raise anything about messages
                error = _refusal(problem)
        if error is None and len(ids) > (limit := self._config.data.max_prompt_length):
            error = f"the prompt has {len(ids)} tokens with what reset returned, over data.max_prompt_length {limit}"
        if error is None:
            return _Opening(Transcript(ids, most), [*reply.messages], None)
        # A conversation that cannot begin is a response without a score, and a response has a token.
        return _Opening(Transcript(prompt.token_ids, 1), [*messages], error)

    def _first_turns(self, group: _Group, openings: Sequence[_Opening]) -> dict[int, asyncio.Future[Turn]]:
        """Request the first turns. Those that have the same prompt are requested together."""
        together: dict[bytes, list[int]] = {}
        for index, opening in enumerate(openings):
            together.setdefault(opening.transcript.prompt.tobytes(), []).append(index)
        turns: dict[int, asyncio.Future[Turn]] = {}
        for indices in together.values():
            prompt = replace(group.prompt, token_ids=openings[indices[0]].transcript.prompt)
            draws = [_draw(group, index, openings[index].transcript) for index in indices]
            turns.update(zip(indices, self._turns.request(prompt, draws, group.wave), strict=True))
        return turns

    async def _converse(
        self, group: _Group, index: int, talk: Conversation, opening: _Opening, first: asyncio.Future[Turn]
    ) -> None:
        """Let the model and the environment take turns, until one of them or a limit ends the conversation."""
        transcript, messages, error = opening.transcript, opening.messages, opening.error
        calls = bad_calls = 0
        finished = False
        turn, engine = await first
        while True:
            transcript.add_turn(turn)
            text = self._environment.text(turn)
            messages.append({"role": "assistant", "content": text})
            if error is not None or not turn.finished:
                break
            reply = await asyncio.wrap_future(talk.answer(*self._environment.read(text)))
            calls, bad_calls = calls + reply.calls, bad_calls + reply.bad_calls
            finished = reply.done and reply.error is None
            if reply.done or transcript.turns >= self._config.environment.max_turns:
                break
            try:
                added = self._environment.added_ids(turn, reply.messages)
            except Exception as problem:  # noqa: BLE001 - see _opening
                error = _refusal(problem)
                break
            if not transcript.add_observation(added):
                break
            messages += reply.messages
            prompt = replace(group.prompt, token_ids=transcript.ids())
            (later,) = self._turns.request(prompt, [_draw(group, index, transcript)], group.wave, engine)
            turn, engine = await later
        outcome = await asyncio.wrap_future(talk.finish())
        if error is not None:
            outcome = Outcome(None, error=error)
        found = transcript.joined(finished, outcome, messages, calls, bad_calls)
        self._turns.post(partial(self._record, group, index, found))


def _draw(group: _Group, index: int, transcript: Transcript) -> tuple[int, Sampling]:
    """Return seed and sampling of the next turn of a conversation."""
    seed, sampling = group.draws[index]
    return turn_seed(seed, transcript.turns), replace(sampling, max_new_tokens=transcript.left)


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: that of the response for the first one, and one that follows from it for others."""
    return seed if turn == 0 else int(np.random.default_rng([seed, turn]).integers(2**62))


def _refusal(error: Exception) -> str:
    """Return why the messages of an environment cannot become tokens, in one line."""
    if isinstance(error, UserError):
        return str(error)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"its messages cannot be tokenized: {reason}"
