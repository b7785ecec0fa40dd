"""One conversation with an environment, whichever of the forms in the package's docstring the user has written."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.environments.schemas import BadArguments, Tool
from hpc_rl.environments.tool_calls import MalformedCall, ToolCall
from hpc_rl.rewards.number import split_reward

Message = dict[str, Any]

SEED = "seed"
"""Parameter of `reset`, or a column of the data that replaces it."""
OWN_METHODS = ("reset", "step", "reward", "close")
"""Public methods of an environment that are not tools."""


@dataclass(frozen=True)
class Definition:
    """What an environment and further functions offer. A process that runs conversations has loaded one."""

    make: Callable[[], Any] | None
    """Creates the environment of a conversation; None if there are only functions."""
    methods: Mapping[str, Tool]
    """Tools that are methods of the environment."""
    functions: Mapping[str, Tool]
    """Tools that are functions."""
    has_step: bool = False
    has_reward: bool = False
    """Whether it has the method `reward`. Only a conversation shows whether `step` returns rewards."""

    @property
    def tools(self) -> dict[str, Tool]:
        """Return all tools by name."""
        return {**self.methods, **self.functions}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of all tools."""
        return [tool.schema for tool in self.tools.values()]


@dataclass(frozen=True)
class Reply:
    """What the environment answers."""

    messages: list[Message]
    """What the conversation grows by."""
    done: bool = False
    calls: int = 0
    """Tool calls that were made."""
    bad_calls: int = 0
    """Tool calls that could not be read or made, or that raised."""
    error: str | None = None
    """Why the environment failed, in one line; the conversation has then ended."""


@dataclass(frozen=True)
class EpisodeResult:
    """The end of a conversation."""

    score: float | None
    """None if the environment gives no reward, or if it failed."""
    components: dict[str, float] = field(default_factory=dict)
    """Further numbers that the reward reported."""
    error: str | None = None
    """Why there is no score, in one line, if something failed."""


class Episode:
    """One conversation. Anything that the user's code raises outside of a tool is raised to the caller."""

    def __init__(self, definition: Definition, most_chars: int) -> None:
        self._definition, self._most_chars = definition, most_chars
        self._environment = definition.make() if definition.make else None
        self._step_rewards: list[float] = []

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Start the conversation about a row. Return the first observation: text, messages or None."""
        method = getattr(self._environment, "reset", None)
        if method is None:
            return None
        found = method(**fitting(method, row))
        # Gymnasium's reset returns (observation, info).
        return found[0] if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping) else found

    def answer(self, text: str, calls: Sequence[ToolCall | MalformedCall]) -> Reply:
        """Answer the model's text, which contains these tool calls."""
        if calls:
            return merged([self.call(call) for call in calls])
        return self._step(text) if self._definition.has_step else Reply([], done=True)

    def call(self, call: ToolCall | MalformedCall) -> Reply:
        """Make one tool call. What goes wrong becomes the tool's message, so that the model can try again."""
        if isinstance(call, MalformedCall):
            return Reply([tool_message(call.name or "unknown", f"Error: {call.reason}")], bad_calls=1)
        tool = self._definition.tools.get(call.name)
        if tool is None:
            known = ", ".join(self._definition.tools) or "none"
            return self._failed(call.name, f"there is no tool {call.name!r}; the tools are: {known}")
        try:
            arguments = tool.arguments(readable(call.arguments))  # pydantic 2.7 refuses lone surrogates
        except BadArguments as error:
            return self._failed(call.name, str(error))
        bound = getattr(self._environment, tool.name) if tool.name in self._definition.methods else tool.function
        try:
            text = as_text(bound(**arguments))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's function may raise anything
            return self._failed(call.name, f"{type(error).__name__}: {error}", calls=1)
        return Reply([tool_message(call.name, cut(text, self._most_chars))], calls=1)

    def result(self) -> EpisodeResult:
        """Return the reward of the conversation, and close the environment.

        Raises:
            ValueError: the reward is not a finite number.
        """
        try:
            if self._environment is not None and self._definition.has_reward:
                score, components = split_reward(self._environment.reward())
                return EpisodeResult(score, components)
            return EpisodeResult(sum(self._step_rewards) if self._step_rewards else None)
        finally:
            self.close()

    def close(self) -> None:
        """Call the environment's `close`."""
        if callable(close := getattr(self._environment, "close", None)):
            close()

    def _step(self, text: str) -> Reply:
        found = self._environment.step(text)  # type: ignore[union-attr]
        observation, reward, done = read_step(found)
        if reward is not None:
            self._step_rewards.append(split_reward(reward)[0])
        messages = [
            {**message, "content": cut(message["content"], self._most_chars)}
            if isinstance(message.get("content"), str)
            else message
            for message in observed(observation)
        ]
        return Reply(messages, done=done or not messages)

    def _failed(self, name: str, reason: str, calls: int = 0) -> Reply:
        return Reply([tool_message(name, cut(f"Error: {reason}", self._most_chars))], calls=calls, bad_calls=1)


def read_step(found: Any) -> tuple[Any, Any, bool]:
    """Return the observation, the reward (None if there is none) and whether the conversation is done.

    Args:
        found: what `step` returned: an observation, or a tuple with 2, 4 (Gym) or 5 (Gymnasium) values.

    Raises:
        ValueError: the tuple has another length.
    """
    if not isinstance(found, tuple):
        return found, None, False
    if len(found) == 2:
        return found[0], None, bool(found[1])
    if len(found) == 4:
        return found[0], found[1], bool(found[2])
    if len(found) == 5:
        return found[0], found[1], bool(found[2]) or bool(found[3])
    raise ValueError(
        f"step returned a tuple of {len(found)} values; expected an observation, (observation, done), (observation, "
        "reward, done, info) or (observation, reward, terminated, truncated, info)"
    )


def observed(observation: Any) -> list[Message]:
    """Return an observation as messages: text as a user message, messages as they are, None as no message.

    Raises:
        ValueError: it is something else.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, Mapping):
        observation = [observation]
    if isinstance(observation, Sequence) and all(_is_message(message) for message in observation):
        # A role of a class of the user's own could not be passed on.
        return [{**message, "role": str.__str__(message["role"])} for message in observation]
    raise ValueError(
        "expected text, or messages with 'role' and 'content' (text), as an observation; got "
        f"{type(observation).__name__}"
    )


def first_messages(prompt: Sequence[Message], observation: Any) -> list[Message]:
    """Return the messages of a prompt with the first observation.

    Text is added to the last message if that is the user's, because many templates refuse two user messages in a row.

    Raises:
        ValueError: see `observed`.
    """
    last = prompt[-1] if prompt else {}
    if isinstance(observation, str) and last.get("role") == "user" and isinstance(last["content"], str):
        return [*prompt[:-1], {**last, "content": "\n\n".join(filter(None, [last["content"], observation]))}]
    return [*prompt, *observed(observation)]


def _is_message(message: Any) -> bool:
    if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message):
        return False
    # For content of another class, transformers 5.24 tokenizes the name of the class.
    return message["content"] is None or isinstance(message["content"], str | list)


def tool_message(name: str, text: str) -> Message:
    """Return the message of a tool's result."""
    return {"role": "tool", "name": name, "content": text}


def merged(replies: Sequence[Reply]) -> Reply:
    """Return one reply for the results of several calls."""
    return Reply(
        [message for reply in replies for message in reply.messages],
        any(reply.done for reply in replies),
        sum(reply.calls for reply in replies),
        sum(reply.bad_calls for reply in replies),
    )


def as_text(value: Any) -> str:
    """Return what a tool returned as text: text as it is, everything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def readable(value: Any) -> Any:
    """Return a value of a message with U+FFFD in the place of each lone surrogate, which is no text: tokenizers refuse
    it. A model can write one in JSON, such as "\\ud83d"."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [readable(each) for each in value]
    return {readable(name): readable(each) for name, each in value.items()} if isinstance(value, dict) else value


def cut(text: str, most_chars: int, left_out: int = 0) -> str:
    """Return the text, without its middle and with a note if it is longer than `most_chars`.

    Both ends are kept, because errors are often at the end.

    Args:
        left_out: characters that the middle has lost before.
    """
    if len(text) <= most_chars:
        return text
    head, tail = text[: most_chars - most_chars // 2], text[len(text) - most_chars // 2 :]
    return f"{head}\n[{len(text) - most_chars + left_out:,} characters are left out]\n{tail}"


def fitting(method: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that a method has parameters for."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return {name: value for name, value in row.items() if name in names}
