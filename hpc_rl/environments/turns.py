"""The token ids that a conversation grows by, without tokenizing again what the model sampled.

A text can be tokenized in many ways, and a model samples others than the tokenizer returns. If a conversation were
rendered and tokenized again after each turn, the model would be trained on tokens that it did not sample. Only the
text that an observation adds is therefore tokenized. It is found by rendering a conversation with and without it.

This is correct only if a template renders earlier turns in the same way when later turns follow. Some templates do not:
they remove the thinking of earlier turns, for example. Turns therefore compares, for a conversation that grows, what it
would build with what the template renders.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, meta

from hpc_rl.data.templates.chat import as_text
from hpc_rl.environments.protocol import Message
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WRITTEN = "Marker."
"""What the assistant writes in the conversations that are compared."""
_PLAN = "Idea."
_THOUGHT = f"<think>\n{_PLAN}\n</think>\n\n{_WRITTEN}"
_CALL_ID = "000000000"  # Mistral's templates demand nine characters
_DUMMY_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": "x", "arguments": {}}}
_SWITCHES = ("preserve_thinking", "clear_thinking", "keep_thinking", "truncate_history_thinking")
"""Variables by which some templates keep the thinking of earlier turns."""
_WHERE = "the chat template"
_FIX = (
    ". The model would see other conversations in training than with this template later: set data.chat_template to a "
    "file with a template that keeps earlier turns as they are"
)
_START: tuple[Message, ...] = ({"role": "user", "content": "Question?"},)


class Turns:
    """Prompts and observations as token ids.

    Args:
        template: the chat template.
        schemas: JSON schemas of the tools.
        variables: further variables of the template.
        observed: roles of the messages that observations have: "tool", "user".
        thinking: whether the model may think, so that its thinking has to be kept.

    Raises:
        UserError: the template refuses such a conversation, or renders earlier turns differently as it grows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        schemas: Sequence[dict[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        observed: Sequence[str] = ("tool",),
        thinking: bool = True,
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._schemas, self._variables = schemas, dict(variables or {})
        self._ending_ids = self._encode(self._ending())
        added = [
            token for token in tokenizer.get_added_vocab() if len(token) > 1 and not token.isalnum() and token.strip()
        ]
        self._marks = sorted({*filter(None, tokenizer.all_special_tokens), *added}, key=len, reverse=True)
        for role in observed:
            self._check(role, thinking)
        self.opens_thinking = self._render(_START, True).rstrip().endswith("<think>")
        """Whether the prompt ends within the model's thinking."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the conversation up to the start of the assistant's first turn."""
        return self._encode(self._render(messages, True))

    def added_ids(self, sampled_ids: Sequence[int], observation: Sequence[Message]) -> list[int]:
        """Return the ids between what the model sampled in its turn and the start of its next turn.

        These are the rest of the end of its turn, the observation, and the next generation prompt.

        Args:
            sampled_ids: with the end-of-turn token if the model wrote it; without it if the turn was cut off.
        """
        ending, added = self._ending_ids, self._encode(self._added_text(self._harmless(observation)))
        if not ending and sampled_ids and added[:1] == [sampled_ids[-1]]:
            return added[1:]  # the model ended its turn with the token that begins the observation
        written = next(
            (count for count in range(len(ending), 0, -1) if list(sampled_ids[-count:]) == ending[:count]), 0
        )
        return ending[written:] + added

    def _added_text(self, observation: Sequence[Message]) -> str:
        """Return the text between the end of the assistant's turn and the start of its next one."""
        try:
            return self._difference(_turn(_WRITTEN), observation)
        except UserError:
            if observation[0]["role"] != "tool":
                raise
        # Some templates refuse the result of a tool that was not called.
        called = _turn(_WRITTEN, calls=len(observation))
        return self._difference(called, [{**message, "tool_call_id": _CALL_ID} for message in observation])

    def _difference(self, turn: Message, observation: Sequence[Message]) -> str:
        asked = [*_START, turn]
        before, after = self._render(asked, False), self._render([*asked, *observation], True)
        if after.startswith(before):
            return after[len(before) :]
        # The template writes the last turn in another way, for example with empty thinking: compare behind its text.
        rest, ending = after.partition(_WRITTEN)[2], self._ending()
        if "tool_calls" in turn or not rest.startswith(ending):
            role = observation[0]["role"]
            raise UserError(f"{_WHERE} ends an assistant's turn differently if a message of role {role} follows{_FIX}")
        return rest.removeprefix(ending)

    def _ending(self) -> str:
        """Return the text that ends an assistant's turn."""
        return self._render([*_START, _turn(_WRITTEN)], False).rpartition(_WRITTEN)[2]

    def _check(self, role: str, thinking: bool) -> None:
        """Raise UserError if the template renders a growing conversation differently than this class builds it."""
        problem = self._problem(role, thinking)
        if problem is None:
            return
        own = self._variables
        for name, value in itertools.product(_switches(self._template), (True, False)):
            self._variables = {**own, name: value}
            if self._problem(role, thinking) is None:
                raise UserError(f"{_WHERE} {problem}: set data.chat_template_kwargs.{name}={str(value).lower()}")
        raise UserError(f"{_WHERE} {problem}{_FIX}")

    def _problem(self, role: str, thinking: bool) -> str | None:
        """Describe how the template changes earlier turns when observations follow; None if it keeps them."""
        try:
            return self._growth_problem(role, thinking, calls=0)
        except UserError:
            if role != "tool":
                raise
        return self._growth_problem(role, thinking, calls=1)

    def _growth_problem(self, role: str, thinking: bool, calls: int) -> str | None:
        messages: list[Message] = list(_START)
        text = self._render(messages, True)
        for number in range(3):
            observation = {"role": role, "content": f"Observation {number}.", "name": "x", "tool_call_id": _CALL_ID}
            messages += [_turn(_THOUGHT if thinking else _WRITTEN, calls), observation]
            longer = self._render(messages, True)
            if not longer.startswith(text):
                return f"changes earlier turns when a message of role {role} follows"
            added = self._ending() + self._added_text([observation])
            written = longer[len(text) :].removesuffix(added)
            if longer == text + written or not (calls or written.endswith(_WRITTEN)):
                return f"renders a message of role {role} differently in turn {number + 2}"
            if thinking and not calls and _PLAN not in written:
                return f"removes the thinking of the assistant's turn before a message of role {role}"
            text = longer
        return None

    def _harmless(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose text holds no special token, so that an observation cannot imitate a turn."""

        def broken(text: str) -> str:
            for mark in self._marks:
                text = text.replace(mark, f"{mark[0]} {mark[1:]}")
            return text

        return [
            {**message, "content": broken(message["content"])} if isinstance(message["content"], str) else message
            for message in messages
        ]

    def _render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return as_text(
            self._tokenizer, self._template, list(messages), "data", generation_prompt, self._schemas, self._variables
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _turn(text: str, calls: int = 0) -> Message:
    """Return an assistant's message."""
    called = {"tool_calls": [_DUMMY_CALL] * calls} if calls else {}
    return {"role": "assistant", "content": text, **called}


def _switches(template: str) -> list[str]:
    """Return the variables of a template by which it may keep earlier turns."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    found = meta.find_undeclared_variables(environment.parse(template))
    return [name for name in _SWITCHES if name in found]
