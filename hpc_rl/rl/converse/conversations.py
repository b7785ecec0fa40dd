"""Conversations with environments: the model writes, an environment answers, and the model goes on.

    asked = conversations.ask(prompt, draws)     # waits until there is room
    while not asked.is_complete:
        conversations.turn(timeout_s)            # engines generate turns, while environments answer others
    asked.completions()                          # each conversation as one response

Besides the invariants of `converse`:

- Siblings, which are the responses to one prompt, begin together. Those with equal prompts request their first turns
  together, because they share an engine.
- Each conversation that an environment has begun is finished once, also if it fails.
- No more conversations are open than can be useful: those that fill the engines, and one for each process of the
  environment, which makes one call at a time. The others wait, in the order in which engines would get their prompts.
  Those of later waves do not count: validation starts at once, however many conversations of a training are open.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from hpc_rl.data.prompts import Prompt
from hpc_rl.data.reading.rows import Message, to_prompt
from hpc_rl.environments.pool import Conversation
from hpc_rl.environments.protocol import SEED, EpisodeResult, Reply
from hpc_rl.errors import UserError
from hpc_rl.rl.converse.environment import Environment
from hpc_rl.rl.converse.partner import Partner, Siblings, converse
from hpc_rl.rl.converse.transcripts import Conversed, Transcript
from hpc_rl.rl.converse.turns import Turn, TurnRequests
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.rl.rollout.respondent import Respondent, Samplings

if TYPE_CHECKING:
    from hpc_rl.rl.actors.cluster import DriverConfig


class Conversations(Respondent):
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

    def pause(self) -> None:
        """Wait until no engine generates. Environments may go on with what they do."""
        self._queue.pause()

    def _start(self) -> None:
        """Start conversations that wait, as many as there is room for."""
        most = self._queue.capacity + self._environment.processes.workers
        while self._waiting and sum(self._open[wave] for wave in self._open if wave <= self._waiting[0].wave) < most:
            group = heapq.heappop(self._waiting)
            self._open[group.wave] += len(group.draws)
            self._turns.start(self._respond(group))

    async def _respond(self, group: _Group) -> None:
        """Let siblings begin together, and let each converse."""
        messages, _ = to_prompt(group.prompt.row, self._config.data, "the data")
        # Responses to one prompt are compared with each other, so that their environments are equal.
        row = {SEED: group.draws[0][0] % 2**31} | group.prompt.row
        partners = [
            _EnvironmentPartner(
                prompt=group.prompt,
                wave=group.wave,
                seed=seed,
                sampling=sampling,
                environment=self._environment,
                talk=self._environment.processes.start(messages, row),
                max_turns=self._config.environment.max_turns,
            )
            for seed, sampling in group.draws
        ]
        replies = await asyncio.gather(*(asyncio.wrap_future(partner.talk.first) for partner in partners))
        for partner, reply in zip(partners, replies, strict=True):
            partner.begin(messages, reply, self._config.data.max_prompt_length)
        turns = self._first_turns(partners)
        await asyncio.gather(
            *(self._conversation(group, index, partner, turns[index]) for index, partner in enumerate(partners))
        )

    def _first_turns(self, partners: Sequence[Partner]) -> dict[int, asyncio.Future[Turn]]:
        """Request the first turns. Those that have the same prompt are requested together."""
        together: dict[bytes, list[int]] = {}
        for index, partner in enumerate(partners):
            together.setdefault(partner.transcript.prompt.tobytes(), []).append(index)
        turns: dict[int, asyncio.Future[Turn]] = {}
        for indices in together.values():
            first = partners[indices[0]]
            prompt = replace(first.prompt, token_ids=first.transcript.prompt)
            draws = [partners[index].draw() for index in indices]
            turns.update(zip(indices, self._turns.request(prompt, draws, first.wave), strict=True))
        return turns

    async def _conversation(self, group: _Group, index: int, partner: Partner, first: asyncio.Future[Turn]) -> None:
        found = await converse(partner, self._turns, first)
        self._turns.post(partial(self._record, group, index, found))

    def _record(self, group: _Group, index: int, found: Conversed) -> None:
        """Record a conversation that has ended, and start others in its room."""
        group.siblings.record(index, found)
        self._open[group.wave] -= 1
        if not self._open[group.wave]:
            del self._open[group.wave]  # waves are steps, and a run has many
        self._start()


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


@dataclass(eq=False, kw_only=True)
class _EnvironmentPartner(Partner):
    """An environment in one conversation."""

    environment: Environment
    talk: Conversation
    max_turns: int
    messages: list[Message] = field(default_factory=list)
    """What the transcript holds, as text."""
    finished: bool = False
    error: str | None = None
    """Why it has no score, if not for an error that the environment reports at the end."""

    def begin(self, messages: Sequence[Message], reply: Reply, most: int) -> None:
        """Begin the conversation.

        Args:
            messages: of the prompt.
            reply: what `reset` of the environment has returned.
            most: data.max_prompt_length.
        """
        ids, self.error = self.prompt.token_ids, reply.error
        if self.error is None:
            try:
                ids = self.environment.prompt_ids(self.prompt, messages, reply.messages)
            except Exception as error:  # noqa: BLE001 - a template or a tokenizer may raise anything about messages
                self.error = _refusal(error)
        if self.error is None and len(ids) > most:
            found = f"the prompt has {len(ids)} tokens with what reset returned"
            self.error = f"{found}, over data.max_prompt_length {most}"
        if self.error is None:
            self.transcript = Transcript(ids, self.sampling.max_new_tokens)
            self.messages = [*reply.messages]
        else:  # a conversation that cannot begin is a response without a score, and a response has a token
            self.transcript = Transcript(self.prompt.token_ids, 1)
            self.messages = [*messages]

    async def answer(self, turn: Completion) -> bool:
        text = self.environment.text(turn)
        self.messages.append({"role": "assistant", "content": text})
        if self.error is not None or not turn.finished:
            return False
        reply = await asyncio.wrap_future(self.talk.answer(*self.environment.read(text)))
        self.calls, self.bad_calls = self.calls + reply.calls, self.bad_calls + reply.bad_calls
        self.finished = reply.done and reply.error is None
        if reply.done or self.transcript.turns >= self.max_turns:
            return False
        try:
            added = self.environment.added_ids(turn, reply.messages)
        except Exception as error:  # noqa: BLE001 - see begin
            self.error = _refusal(error)
            return False
        if not self.transcript.add_observation(added):
            return False
        self.messages += reply.messages
        return True

    async def end(self) -> Conversed:
        outcome = await asyncio.wrap_future(self.talk.finish())
        if self.error is not None:
            outcome = EpisodeResult(None, error=self.error)
        return self.transcript.joined(self.finished, outcome, self.messages, self.calls, self.bad_calls)


def _refusal(error: Exception) -> str:
    """Return why the messages of an environment cannot become tokens, in one line."""
    if isinstance(error, UserError):
        return str(error)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"its messages cannot be tokenized: {reason}"
