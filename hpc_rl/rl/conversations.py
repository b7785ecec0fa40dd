"""Responses with several turns: the model writes, an environment answers, and the model goes on.

    asked = conversations.ask(prompt, draws)     # the environment begins a conversation for each response
    while not asked.is_complete:
        conversations.turn(timeout_s)            # engines generate turns, while environments answer others
    asked.completions()                          # each conversation as one response

Each open conversation is in one of four places: its environment begins it (with the others of its prompt, because they
share an engine), an engine generates a turn, its environment answers this turn, or its environment computes the reward.
The answers of environments are awaited in other threads, so that no conversation waits for the environment of another.

No more conversations are open than can be useful: those that fill the engines, and one for each process of the
environment, which makes one call at a time. The others wait, in the order in which engines would get their prompts.
Those of later waves do not count: validation starts at once, however many conversations of a training are open.
"""

from __future__ import annotations

import copy
import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpc_rl.data.prompts import Prompt
from hpc_rl.data.rows import Message, to_prompt
from hpc_rl.environments.pool import Conversation, Environments
from hpc_rl.environments.protocol import SEED, Outcome, Reply
from hpc_rl.environments.tool_calls import VLLM, Call, Malformed, after_thinking, find_parser
from hpc_rl.environments.turns import Turns
from hpc_rl.environments.vllm_parsers import load_vllm_parser
from hpc_rl.errors import UserError
from hpc_rl.host.heartbeat import heart
from hpc_rl.rl.rollout.engine import Completion, Sampling
from hpc_rl.rl.rollout.request_queue import TURN_S, Asked, RequestQueue
from hpc_rl.rl.rollout.respondent import Samplings
from hpc_rl.rl.transcripts import Conversed, Transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.rl.cluster import DriverConfig

T = TypeVar("T")


class Environment:
    """The environment of a run: its processes, and how its messages become tokens.

    Args:
        tokenizer: with the run's chat template.
        processes: are closed with this, and if it cannot be created.

    Raises:
        UserError: the environment gives no reward and nothing else does, or the chat template does not fit
            conversations.
    """

    def __init__(self, config: DriverConfig, tokenizer: PreTrainedTokenizerBase, processes: Environments) -> None:
        self.processes = processes
        try:
            self._prepare(config, tokenizer)
        except UserError:
            self.processes.close()
            raise

    def _prepare(self, config: DriverConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        own, offered = config.environment, self.processes.offered
        if config.needs_scores and not (offered.has_reward or offered.has_step or config.reward.sources):
            raise UserError(
                f"environment.name {own.name} has no method `reward`, and no reward is set: add the method, or set "
                "reward.function"
            )
        self.schemas = offered.schemas
        self._tokenizer = copy.deepcopy(tokenizer)  # other threads use the run's
        template = self._tokenizer.get_chat_template()
        self.roles = ["tool"] * bool(self.schemas) + ["user"] * offered.has_step
        self.turns = Turns(self._tokenizer, template, self.schemas, config.data.chat_template_kwargs, self.roles)
        if own.tool_format.startswith(VLLM):
            self._parse = load_vllm_parser(own.tool_format.removeprefix(VLLM), self._tokenizer, self.schemas)
        elif self.schemas:
            self._parse = find_parser(own.tool_format, template)

    def text(self, turn: Completion) -> str:
        """Return what the model wrote in a turn."""
        # Formats of tool calls have special tokens; the last token is the one that ends the turn.
        ids = turn.token_ids[:-1] if turn.finished else turn.token_ids
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def read(self, text: str) -> tuple[str, list[Call | Malformed]]:
        """Return what the model wrote without its thinking, and its tool calls."""
        visible = after_thinking(text, self.turns.opens_thinking)
        return visible, self._parse(visible) if self.schemas else []

    def prompt_ids(self, prompt: Prompt, asked: Sequence[Message], first: Sequence[Message]) -> NDArray[np.int32]:
        """Return the prompt of a conversation.

        Args:
            asked: the messages of the prompt.
            first: these messages with what the environment has added.
        """
        if list(first) == list(asked):
            return prompt.token_ids
        return np.array(self.turns.prompt_ids(first), np.int32)

    def added_ids(self, turn: Completion, messages: Sequence[Message]) -> list[int]:
        """Return the ids between a turn and the next one.

        Raises:
            UserError: the messages do not fit the chat template.
        """
        if other := {str(message["role"]) for message in messages} - {*self.roles}:
            raise UserError(f"it returned a message of role {min(other)}; return {' or '.join(self.roles)}")
        return self.turns.added_ids(turn.token_ids.tolist(), messages)

    def close(self) -> None:
        """End the processes."""
        self.processes.close()


@dataclass
class Conversations:
    """What responds to prompts with conversations; see Respondent. The queue generates the turns of the model."""

    queue: RequestQueue
    environment: Environment
    config: DriverConfig
    _waiting: list[_Waiting] = field(default_factory=list)
    """A heap."""
    _asked: int = 0
    _open: Counter[int] = field(default_factory=Counter)
    """Number of conversations that have started and not ended, by wave."""
    _beginning: list[_Group] = field(default_factory=list)
    _generating: list[_Talk] = field(default_factory=list)
    _answered: list[_Talk] = field(default_factory=list)
    """Those whose environment answers."""
    _ending: list[_Talk] = field(default_factory=list)

    def ask(self, prompt: Prompt, draws: Samplings, wave: int = 0) -> Talks:
        """See Respondent."""
        found = Talks(len(draws))
        self._asked += 1
        heapq.heappush(self._waiting, _Waiting(wave, -len(prompt.token_ids), self._asked, prompt, draws, found))
        return found

    def turn(self, timeout_s: float) -> None:
        """See Respondent.

        Raises:
            UserError: an engine refused a request.
            RunError: too many engines have died, or the environment cannot be loaded again.
        """
        self._hear()
        if self._generating:
            self.queue.turn(timeout_s)
            self._read()
        else:
            with heart.waiting():
                wait(self._awaited(), timeout_s, FIRST_COMPLETED)
        self._hear()

    def wait(self, asked: Sequence[Talks]) -> None:
        """See Respondent."""
        while not all(one.is_complete for one in asked):
            self.turn(TURN_S)

    def pause(self) -> None:
        """See Respondent. Environments may go on with what they do."""
        self.queue.pause()

    def _start(self) -> None:
        """Start conversations that wait, as many as there is room for."""
        most = self.queue.capacity + self.environment.processes.workers
        while self._waiting and sum(self._open[wave] for wave in self._open if wave <= self._waiting[0].wave) < most:
            asked = heapq.heappop(self._waiting)
            self._open[asked.wave] += len(asked.draws)
            messages, _ = to_prompt(asked.prompt.row, self.config.data, "the data")
            # Responses to one prompt are compared with each other, so that their environments are equal.
            row = {SEED: asked.draws[0][0] % 2**31} | asked.prompt.row
            talks = []
            for index, (seed, sampling) in enumerate(asked.draws):
                begun = self.environment.processes.start(messages, row)
                talks.append(_Talk(asked.found, index, asked.prompt, asked.wave, seed, sampling, begun, begun.first))
            self._beginning.append(_Group(asked.prompt, messages, asked.wave, talks))

    def _awaited(self) -> list[Future[Any]]:
        beginning = (talk for group in self._beginning for talk in group.talks)
        talks = (*beginning, *self._answered, *self._ending)
        return [talk.awaited for talk in talks if not talk.awaited.done()]

    def _hear(self) -> None:
        """Go on with the conversations whose environments have answered, and start others."""
        begun, self._beginning = _split(self._beginning, lambda group: all(t.awaited.done() for t in group.talks))
        for group in begun:
            self._begin(group)
        answered, self._answered = _split(self._answered, lambda talk: talk.awaited.done())
        for talk in answered:
            self._go_on(talk, talk.awaited.result())
        ended, self._ending = _split(self._ending, lambda talk: talk.awaited.done())
        for talk in ended:
            talk.end(talk.awaited.result())
            self._open[talk.wave] -= 1
            if not self._open[talk.wave]:
                del self._open[talk.wave]  # waves are steps, and a run has many
        self._start()

    def _begin(self, group: _Group) -> None:
        """Request the first turns. Those that have the same prompt are requested together."""
        together: dict[bytes, list[_Talk]] = {}
        for talk in group.talks:
            reply: Reply = talk.awaited.result()
            ids, talk.error = self._first_prompt(group, reply)
            talk.messages = [*(group.messages if talk.error is not None else reply.messages)]
            # A conversation that cannot begin is a response without a score, and a response has a token.
            most = talk.sampling.max_new_tokens if talk.error is None else 1
            talk.transcript = Transcript(ids, most)
            together.setdefault(ids.tobytes(), []).append(talk)
        for talks in together.values():
            self._request(talks, None)

    def _first_prompt(self, group: _Group, reply: Reply) -> tuple[NDArray[np.int32], str | None]:
        """Return the prompt of a conversation, and why it cannot begin."""
        if reply.error is not None:
            return group.prompt.token_ids, reply.error
        try:
            ids = self.environment.prompt_ids(group.prompt, group.messages, reply.messages)
        except Exception as error:  # noqa: BLE001 - a template or a tokenizer may raise anything about such messages
            return group.prompt.token_ids, _refusal(error)
        if len(ids) > (most := self.config.data.max_prompt_length):
            problem = f"the prompt has {len(ids)} tokens with what reset returned, over data.max_prompt_length {most}"
            return group.prompt.token_ids, problem
        return ids, None

    def _request(self, talks: Sequence[_Talk], engine: int | None) -> None:
        """Request the next turns of conversations that are equal so far."""
        prompt = replace(talks[0].prompt, token_ids=talks[0].transcript.ids())
        asked = self.queue.ask(prompt, [talk.draw() for talk in talks], talks[0].wave, engine)
        for talk, request in zip(talks, asked.requests, strict=True):
            talk.asked, talk.number = asked, request.number
        self._generating += talks

    def _read(self) -> None:
        """Give the turns that are complete to the environments."""
        written, self._generating = _split(self._generating, lambda talk: talk.number in talk.asked.found)
        for talk in written:
            talk.turn = talk.asked.found[talk.number]
            talk.transcript.add_turn(talk.turn)
            text = self.environment.text(talk.turn)
            talk.messages.append({"role": "assistant", "content": text})
            if talk.error is None and talk.turn.finished:
                talk.awaited = talk.environment.answer(*self.environment.read(text))
                self._answered.append(talk)
            else:
                self._finish(talk)

    def _go_on(self, talk: _Talk, reply: Reply) -> None:
        """Continue after an observation, or end the conversation."""
        talk.calls, talk.bad_calls = talk.calls + reply.calls, talk.bad_calls + reply.bad_calls
        talk.finished = reply.done and reply.error is None
        if not reply.done and talk.transcript.turns < self.config.environment.max_turns:
            try:
                added = self.environment.added_ids(talk.turn, reply.messages)
            except Exception as error:  # noqa: BLE001 - see _first_prompt
                talk.error = _refusal(error)
            else:
                if talk.transcript.add_observation(added):
                    talk.messages += reply.messages
                    self._request([talk], talk.asked.engines[talk.number])
                    return
        self._finish(talk)

    def _finish(self, talk: _Talk) -> None:
        talk.awaited = talk.environment.finish()
        self._ending.append(talk)


@dataclass
class Talks:
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
class _Waiting:
    """Conversations about one prompt that have not started, in the order in which they do; compare Dispatch."""

    wave: int
    shortness: int
    """Minus the tokens of the prompt."""
    number: int
    prompt: Prompt = field(compare=False)
    draws: Samplings = field(compare=False)
    found: Talks = field(compare=False)


@dataclass
class _Talk:
    """One conversation."""

    found: Talks
    index: int
    prompt: Prompt
    wave: int
    seed: int
    sampling: Sampling
    environment: Conversation
    awaited: Future[Any]
    """What the environment answers next."""
    transcript: Transcript = field(init=False)
    messages: list[Message] = field(init=False)
    """What the transcript holds, as text."""
    asked: Asked = field(init=False)
    number: int = -1
    """Of the request for its turn."""
    turn: Completion = field(init=False)
    """The latest."""
    calls: int = 0
    bad_calls: int = 0
    finished: bool = False
    error: str | None = None
    """Why it has no score, if not for an error that the environment reports."""

    def draw(self) -> tuple[int, Sampling]:
        """Return seed and sampling of the next turn."""
        transcript = self.transcript
        return turn_seed(self.seed, transcript.turns), replace(self.sampling, max_new_tokens=transcript.left)

    def end(self, outcome: Outcome) -> None:
        """Record the end of the conversation."""
        if self.error is not None:
            outcome = Outcome(None, error=self.error)
        own = (self.messages, self.calls, self.bad_calls)
        self.found.found[self.index] = self.transcript.joined(self.finished, outcome, *own)


@dataclass
class _Group:
    """Conversations that begin."""

    prompt: Prompt
    messages: list[Message]
    wave: int
    talks: list[_Talk]


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: that of the response for the first one, and one that follows from it for others."""
    return seed if turn == 0 else int(np.random.default_rng([seed, turn]).integers(2**62))


def _refusal(error: Exception) -> str:
    """Return why the messages of an environment cannot become tokens, in one line."""
    if isinstance(error, UserError):
        return str(error)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return f"its messages cannot be tokenized: {reason}"


def _split(items: list[T], is_chosen: Callable[[T], bool]) -> tuple[list[T], list[T]]:
    """Return the chosen items and the others."""
    chosen: list[T] = []
    others: list[T] = []
    for item in items:
        (chosen if is_chosen(item) else others).append(item)
    return chosen, others
