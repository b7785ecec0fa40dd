"""Messages in the form that a chat template expects, and the fields of messages that it leaves out.

Templates differ in what they take: arguments of tool calls as objects or as text, null or no `content` in a turn that
only calls tools, another name of the reasoning. A short conversation that is rendered in each form shows which one a
template renders as it was meant.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hpc_rl.data.templates.jinja_rendering import render_plainly
from hpc_rl.data.templates.messages import REASONING, TRAIN, Message
from hpc_rl.errors import UserError

_SHORT = 8
"""Text of fewer characters may be in a chat by chance."""
_NAME, _KEY, _VALUE = "probe_name", "probe_key", "probe_value"
_CALL_ID = "probe0001"
"""Nine letters and digits: some templates check it."""
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>", "unk_token": "<u>"}
_NULL, _ABSENT, _EMPTY = "null", "absent", "empty"


@dataclass(frozen=True)
class Forms:
    """What a chat template expects."""

    content: str = _NULL
    """A turn that only calls tools has the content null, no content, or an empty one."""
    arguments_as_text: bool = False
    """Whether arguments of tool calls are JSON text instead of objects."""
    reasoning: str | None = None
    """The name of the reasoning; None: as it is."""
    has_developer: bool = True
    """Whether the template has the role `developer`, or else only `system`."""

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in these forms."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        found = {name: part for name, part in message.items() if name != TRAIN}
        if self.reasoning is not None and self.reasoning not in found:
            found = {self.reasoning if name in REASONING else name: part for name, part in found.items()}
        if not self.has_developer and found["role"] == "developer":
            found["role"] = "system"
        if found.get("content") is None and self.content != _NULL:
            found.pop("content", None)
            found |= {"content": ""} if self.content == _EMPTY else {}
        if self.arguments_as_text and found.get("tool_calls"):
            found["tool_calls"] = [_with_text(call) for call in found["tool_calls"]]
        return found


@lru_cache(maxsize=64)
def forms_of(template: str) -> Forms:
    """Return what a chat template expects."""
    arguments, content = _probed(template)
    named = [name for name in REASONING if re.search(rf"(?<!\w){name}(?!\w)", template)]
    return Forms(content, arguments, named[0] if named else None, "developer" in template)


def _probed(template: str) -> tuple[bool, str]:
    """Return whether arguments are text, and the form of a missing content: the first that is rendered well."""
    choices = list(itertools.product((False, True), (_NULL, _ABSENT, _EMPTY)))
    texts = {choice: _probe(template, *choice) for choice in choices}
    plain = min((text.count("None") for text in texts.values() if text is not None), default=0)
    good = [choice for choice, text in texts.items() if text is not None and _is_good(text, plain)]
    called = [choice for choice in good if _NAME in str(texts[choice])]
    return next(iter(called or good), (False, _ABSENT))


def _is_good(text: str, plain: int) -> bool:
    """Return whether no value is written as Python writes it, and no JSON is encoded twice."""
    return text.count("None") <= plain and f"{{'{_KEY}'" not in text and f'\\"{_KEY}' not in text


def _probe(template: str, arguments_as_text: bool, content: str) -> str | None:
    call = {
        "id": _CALL_ID,
        "type": "function",
        "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
    }
    messages: list[Message] = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "R", "name": _NAME, "tool_call_id": _CALL_ID},
        {"role": "assistant", "content": "A"},
    ]
    schema = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "other", "description": "D", "parameters": schema}}]
    try:
        fitted = Forms(content, arguments_as_text).fitted(messages)
        return render_plainly(template, fitted, "", {**_TOKENS, "tools": tools})
    except UserError:
        return None


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


TextOf = Callable[[list[Message], list[Any]], str]
"""Renders messages with the schemas of tools."""


def unused(
    text: str | None, messages: Sequence[Message], tools: Sequence[Any], text_of: TextOf, where: str
) -> dict[str, int]:
    """Return the fields of a chat that have no effect on its text, each with the number of its messages.

    Args:
        text: the chat as it is trained; None: as text_of renders it.
        where: file and row number, for the error.

    Raises:
        UserError: a turn to learn has nothing that the template renders.
    """

    @lru_cache(maxsize=1)
    def rendered() -> str:
        return text_of(list(messages), list(tools))

    shown = rendered() if text is None else text

    def is_lost(index: int, name: str) -> bool:
        message = messages[index]
        if name in ("role", TRAIN) or _is_in(message[name], shown, 1 if name == "content" else _SHORT):
            return False
        rest = {key: part for key, part in message.items() if key != name}
        without = {**rest, "content": ""} if name == "content" else rest
        return _renders(text_of, [*messages[:index], without, *messages[index + 1 :]], tools, rendered())

    found: dict[str, int] = {}
    for index, message in enumerate(messages):
        lost = [name for name in message if is_lost(index, name)]
        for name in lost:
            found[name] = found.get(name, 0) + 1
        said = {name for name in ("content", "tool_calls", *REASONING) if message.get(name)}
        if message["role"] == "assistant" and message.get(TRAIN, True) and said and said <= {*lost}:
            raise UserError(
                f"{where}: the chat template renders nothing of turn {index + 1} ({', '.join(sorted(said))}), so an "
                "empty turn would be learned; use a template that renders it (data.chat_template), or remove the turn"
            )
    names = [str(tool["function"].get("name")) for tool in tools]
    if not all(name in shown for name in names) and _renders(text_of, list(messages), [], rendered()):
        found["tools"] = 1
    return found


def _is_in(value: Any, text: str, least: int) -> bool:
    """Return whether a value has nothing, or is text of at least so many characters that a chat contains."""
    return not value or (isinstance(value, str) and len(value) >= least and value.strip() in text)


def _renders(text_of: TextOf, messages: list[Message], tools: Sequence[Any], expected: str) -> bool:
    try:
        return text_of(messages, list(tools)) == expected
    except UserError:  # the template asks for what was removed
        return False
