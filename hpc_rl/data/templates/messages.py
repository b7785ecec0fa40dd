"""Chat messages in one form, whichever of the forms of OpenAI, TRL, axolotl and verl a row has them in.

A message has `role` and `content` (text), and may have further fields that chat templates render: `tool_calls` with
arguments as objects, `reasoning_content`, `name` and so on. `content` is null if a turn only calls tools. A turn that
is not to be learned has `train: false`. What would have to be ignored is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpc_rl.data.reading.formats import Row, kind_of
from hpc_rl.errors import UserError

Message = dict[str, Any]

TRAIN = "train"
_TRAIN_FIELDS = ("train", "training", "weight", "loss", "trainable")
"""Names of the mark by which data sets include or exclude a turn: axolotl, OpenAI, ms-swift."""
_REFUSED = {
    "train_detail": "the loss of a part of a turn cannot be set; use `train` for the whole turn",
    "training_detail": "the loss of a part of a turn cannot be set; use `train` for the whole turn",
    "audio": "sound is not supported",
    "images": "images are not supported",
    "videos": "videos are not supported",
}
"""Fields of a message without which it means something else."""
_ROLES = {"function": "tool"}
CONVERT = "convert them with hpc-rl data convert FILE --output NEW.jsonl"

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of what a turn of the assistant thinks before its answer."""
SYSTEM_KEY = "system"
_TOOLS_KEYS = ("tools", "functions")
_THINKING_KEY = "enable_thinking"
_VARIABLES_KEY = "chat_template_kwargs"
_OTHER_KEYS = ("parallel_tool_calls", "margin", "input", "history")
READ_KEYS = (*_TOOLS_KEYS, _THINKING_KEY, _VARIABLES_KEY, SYSTEM_KEY)
"""Columns that are read besides those that options name, if a row has them."""
_MEDIA_KEYS = ("images", "image", "videos", "video", "audios", "audio")


@dataclass(frozen=True)
class Extras:
    """What a row gives its chat template besides messages."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the tools that the template describes to the model."""
    variables: dict[str, Any] = field(default_factory=dict)


NO_EXTRAS = Extras()


class Chat(NamedTuple):
    """A chat to tokenize."""

    messages: list[Message]
    where: str
    """File and row number, for errors."""
    extras: Extras = NO_EXTRAS


def as_chat(value: Any, key: str, where: str) -> list[Message]:
    """Return the messages in a column.

    Raises:
        UserError: the value is not a list of messages.
    """
    value = from_json(value)
    if isinstance(value, str):
        raise UserError(
            f"{where}: column {key!r} has text, but a list of messages is needed; for columns of text (csv and tsv "
            "have no others) set data.prompt_key and data.response_key"
        )
    if isinstance(value, Mapping):
        value = _turned(value)
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: column {key!r} has {kind_of(value)}; a list of messages is needed")
    return [_message(each, f"{where}: message {number} of {key!r}") for number, each in enumerate(value, start=1)]


def extras(row: Row, where: str) -> Extras:
    """Return the columns of a row that are for its chat template.

    Raises:
        UserError: one of them has another form, or the row has images, videos or sound.
    """
    for key in _MEDIA_KEYS:
        if row.get(key):
            raise UserError(
                f"{where}: column {key!r} has data, and only text is trained; remove the row, or the column if its "
                "text makes sense alone"
            )
    variables = from_json(row.get(_VARIABLES_KEY) or {})
    if not isinstance(variables, Mapping):
        raise UserError(f"{where}: column {_VARIABLES_KEY!r} has {kind_of(variables)}; an object is needed")
    thinking = row.get(_THINKING_KEY)
    if thinking not in (None, "", True, False):
        raise UserError(f"{where}: column {_THINKING_KEY!r} has {kind_of(thinking)}; true or false is needed")
    if thinking in (True, False):
        if variables.get(_THINKING_KEY) not in (None, thinking):
            raise UserError(
                f"{where}: the column {_THINKING_KEY!r} has {bool(thinking)}, and {_VARIABLES_KEY!r} has "
                f"{variables[_THINKING_KEY]!r}; remove one of them"
            )
        variables = {**variables, _THINKING_KEY: bool(thinking)}
    return Extras([tool for key in _TOOLS_KEYS for tool in _tools(row.get(key), key, where)], dict(variables))


def without_effect(row: Row, used: Sequence[str]) -> list[str]:
    """Return the columns that change the meaning of a row elsewhere, but are not read here.

    Args:
        used: the columns that options name.
    """
    keys = _OTHER_KEYS if isinstance(row.get(SYSTEM_KEY), str) else (*_OTHER_KEYS, SYSTEM_KEY)
    return [name for name in keys if row.get(name) and name not in used]


def fields_without_effect(unused: Mapping[str, int]) -> list[str]:
    """Describe the fields that are not in the text of chats, if there are any."""
    found = ", ".join(f"{name} ({count:,})" for name, count in sorted(unused.items()))
    return [f"fields without effect: {found}"] if found else []


def with_system(messages: list[Message], row: Row, keys: Sequence[str | None], where: str) -> list[Message]:
    """Return a chat with the text of the column `system` as its system message, if it has none.

    Args:
        keys: the columns that options name; `system` may be one of them.

    Raises:
        UserError: the chat has a system message with another text.
    """
    text, first = row.get(SYSTEM_KEY), messages[0]
    if not isinstance(text, str) or not text or SYSTEM_KEY in keys:
        return messages
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    if (first["content"] or "").strip() != text.strip():
        raise UserError(
            f"{where}: the column {SYSTEM_KEY!r} and the {first['role']} message of the chat have different texts, but "
            "a chat has only one: remove the column or the message"
        )
    return messages


def from_json(value: Any) -> Any:
    """Return the list or object that a text holds as JSON; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _turned(value: Mapping[str, Any]) -> Any:
    """Return messages that are stored by field, as {"role": [...], "content": [...]}, one by one."""
    columns = list(value.values())
    is_table = "role" in value and all(isinstance(one, list) and len(one) == len(columns[0]) for one in columns)
    return [dict(zip(value, parts, strict=True)) for parts in zip(*columns, strict=True)] if is_table else value


def _message(given: Any, where: str) -> Message:
    given = from_json(given)
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        shape = isinstance(given, dict) and "from" in given and "value" in given
        hint = f"; this is ShareGPT's form: {CONVERT}" if shape else ""
        raise UserError(f'{where} is not of the form {{"role": ..., "content": ...}}{hint}')
    found = {name: part for name, part in given.items() if part is not None}
    for name, reason in _REFUSED.items():
        if found.pop(name, None):
            raise UserError(f"{where} has `{name}`: {reason}")
    found["role"] = _ROLES.get(found["role"], found["role"])
    calls = _calls(found, where)
    found |= {"tool_calls": calls} if calls else {}
    found["content"] = _content(found, where)
    if found["content"] is None and not calls:
        raise UserError(f"{where} has no text in `content`")
    return _marked(found, where)


def _content(message: Message, where: str) -> str | None:
    """Return the text of a message, or None if there is none; take out OpenAI's `refusal`, which replaces it."""
    content, refusal = message.get("content"), message.pop("refusal", None)
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if content is not None and not isinstance(content, str):
        raise UserError(f"{where} has {kind_of(content)} in `content`; text is needed")
    if not refusal:
        return content
    if content or not isinstance(refusal, str):
        raise UserError(f"{where} has both `content` and `refusal`; keep one of them")
    return refusal


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        kind = part.get("type", "text")
        text = next(
            (part[name] for name in ("text", "refusal", "content", "value") if part.get(name) is not None), None
        )
        if any(part.get(name) is not None for name in ("train", "weight")):
            raise UserError(f"{where} marks parts of its content: {_REFUSED['train_detail']}")
        if kind in ("text", "input_text", "output_text", "refusal") and isinstance(text, str):
            return text
        raise UserError(f"{where} has a part of the type {kind!r} in `content`; only text is trained")
    raise UserError(f"{where} has {kind_of(part)} as a part of `content`; text is needed")


def _calls(message: Message, where: str) -> list[dict[str, Any]]:
    """Take the tool calls out of a message, and return them in the form of chat templates."""
    old, calls = message.pop("function_call", None), from_json(message.pop("tool_calls", None))
    if old:
        calls = [*(calls or []), old]
    if not isinstance(calls, list | None):
        raise UserError(f"{where} has {kind_of(calls)} in `tool_calls`; a list is needed")
    return [_call(from_json(call), where) for call in calls or []]


def _call(call: Any, where: str) -> dict[str, Any]:
    if isinstance(call, dict) and "function" not in call and "name" in call:
        call = {"function": call}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{where} has a tool call that is not of the form "
            '{"type": "function", "function": {"name": ..., "arguments": ...}}'
        )
    arguments = from_json(from_json(_unquoted(function.get("arguments")) or {}))
    if not isinstance(arguments, dict):
        raise UserError(
            f"{where} calls {function['name']!r} with arguments that are no JSON object: {str(arguments)[:60]!r}"
        )
    rest = {name: part for name, part in call.items() if part is not None}
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def _unquoted(value: Any) -> Any:
    """Return the text of arguments that were encoded twice."""
    if isinstance(value, str) and value[:1] == '"':
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _marked(message: Message, where: str) -> Message:
    """Replace the mark that excludes a turn from the loss with `train: false`."""
    marks = {name: message.pop(name) for name in _TRAIN_FIELDS if name in message}
    for name, mark in marks.items():
        if mark not in (0, 1):
            raise UserError(f"{where} has {mark!r} in `{name}`; true or false (1 or 0) is needed")
        if mark and message["role"] != "assistant" and name != "weight":
            raise UserError(
                f"{where} is a turn of the {message['role']} with `{name}`; only the assistant's are learned"
            )
    if len(set(map(bool, marks.values()))) > 1:
        raise UserError(f"{where} has contradictory marks: {', '.join(marks)}")
    return {**message, TRAIN: False} if marks and not all(marks.values()) else message


def _tools(value: Any, key: str, where: str) -> list[dict[str, Any]]:
    tools = from_json(value)
    if tools is None or tools == "":
        return []
    tools = [tools] if isinstance(tools, dict) else tools
    if not isinstance(tools, list):
        raise UserError(f"{where}: column {key!r} has {kind_of(tools)}; a list of JSON schemas is needed")
    return [_tool(from_json(tool), key, where) for tool in tools]


def _tool(tool: Any, key: str, where: str) -> dict[str, Any]:
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        return {"type": "function", **tool}
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise UserError(
            f"{where}: column {key!r} has {kind_of(tool)} as a tool; the form is "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        )
    return {"type": "function", "function": {name: part for name, part in tool.items() if name != "type"}}
