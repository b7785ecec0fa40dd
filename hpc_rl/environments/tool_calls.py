"""Tool calls in a model's text, one parser for each format. No text makes a parser raise.

Formats are those of chat templates: a JSON object in `<tool_call>` (Hermes, Qwen), a bare JSON object (Llama 3) and
`<function=NAME><parameter=X>value</parameter></function>` (Qwen3-Coder).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_rl.errors import UserError


@dataclass(frozen=True)
class ToolCall:
    """A tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """A tool call that cannot be read. The reason is for the model."""

    reason: str
    name: str = ""
    """The tool, if it is known."""


Parse = Callable[[str], list[ToolCall | MalformedCall]]
"""Returns the tool calls in what a model wrote after its thinking, in order; an empty list if there is none."""

_HERMES = '<tool_call>{"name": "NAME", "arguments": {...}}</tool_call>'
_JSON = '{"name": "NAME", "arguments": {...}}'
_XML = "<function=NAME><parameter=ARGUMENT>value</parameter></function>"
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*+(?:json|tool_call|tool_code)?[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL
)
_PYTHON_TAG = "<|python_tag|>"
"""Llama 3 may write it before a call."""
_FUNCTION = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>")
_NAMED_OBJECT = re.compile(r'[\[\s]*\{\s*"name"\s*:')
_END_PARAMETER = "</parameter>"
_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_MOST_CALLS = 1000
_DECODER = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"\s*")


def after_thinking(text: str, in_thinking: bool) -> str:
    """Return what follows the model's thinking, in which it may write calls that it does not make.

    Args:
        in_thinking: whether the prompt ends with `<think>`, so that the text begins within the thinking.
    """
    if not in_thinking and not text.lstrip().startswith("<think>"):
        return text
    return text.partition("</think>")[2]


def parse_hermes(text: str) -> list[ToolCall | MalformedCall]:
    """Read every `<tool_call>` with a JSON object. The end tag may be missing, but not a part of the object."""
    found: list[ToolCall | MalformedCall] = []
    at = text.find(_TAG)
    while at >= 0:
        if len(found) == _MOST_CALLS:  # each error of the JSON decoder counts the lines of the whole text
            return [*found, MalformedCall(f"more than {_MOST_CALLS} tool calls in one turn; write fewer")]
        start = _after_space(text, at + len(_TAG))
        value, end = _decode(text, start)
        if end is None:
            end = text.find(_END_TAG, start)
            found.append(_malformed(text[start : end if end >= 0 else len(text)], _HERMES))
            if end < 0:
                break
        else:
            found.append(_call(value, _HERMES))
        at = text.find(_TAG, end)
    return found


def parse_json(text: str) -> list[ToolCall | MalformedCall]:
    """Read a JSON object, or a list of them, that is the whole text, begins a line, or is in a fenced block.

    JSON without a name and arguments is no call.
    """
    text = text.lstrip().removeprefix(_PYTHON_TAG)
    blocks = [block.strip() for block in _FENCE.findall(text)]
    if not blocks:
        start = re.search(r"^[ \t]*[\[{]", text, re.MULTILINE)
        blocks = [text[start.start() :].strip()] if start else []
    found: list[ToolCall | MalformedCall] = []
    for block in blocks:
        at = 0
        while at < len(block):
            value, end = _decode(block, at)
            if end is None:
                if _NAMED_OBJECT.match(block, at):
                    found.append(_malformed(block[at:], _JSON))
                break
            values = value if isinstance(value, list) else [value]
            found += [_call(each, _JSON) for each in values if _names_a_tool(each)]
            # Llama 3 writes several calls with semicolons between them.
            at = _after_space(block, end)
            at = _after_space(block, at + block.startswith(";", at))
            if not block.startswith(("{", "["), at):
                break
    return found


def parse_xml(text: str) -> list[ToolCall | MalformedCall]:
    """Read every `<function=NAME>` with its parameters, whose values are text. Tool.arguments converts them."""
    found: list[ToolCall | MalformedCall] = []
    at, last_end = 0, text.rfind(_END_PARAMETER)
    while match := _FUNCTION.search(text, at):
        name, at = match[1].strip(), match.end()
        arguments: dict[str, Any] = {}
        while (parameter := _PARAMETER.match(text, at)) and parameter.end() <= last_end:
            end = text.index(_END_PARAMETER, parameter.end())
            # Templates put each value on lines of its own.
            value = text[parameter.end() : end].removeprefix("\n")
            arguments[parameter[1].strip()] = value.removesuffix("\n")
            at = end + len(_END_PARAMETER)
        ended = text.startswith("</function>", _after_space(text, at))
        if not name:
            found.append(MalformedCall(f"the tool call has no name; write it as {_XML}"))
        elif not ended:
            found.append(
                MalformedCall(f"the tool call does not end after {len(arguments)} parameters; write it as {_XML}", name)
            )
        else:
            found.append(ToolCall(name, arguments))
    if not found and _TAG in text:
        found.append(MalformedCall(f"there is no function in <tool_call>; write it as {_XML}"))
    return found


PARSERS: dict[str, Parse] = {"hermes": parse_hermes, "json": parse_json, "xml": parse_xml}
"""Format -> parser."""
VLLM = "vllm:"
"""`vllm:NAME` is a parser of vLLM. They are for formats that PARSERS lacks: see vllm_parsers.py."""


def find_parser(name: str, template: str) -> Parse:
    """Return the parser of a format.

    Args:
        name: one of PARSERS, or "auto" for the format that the chat template describes to the model.
        template: the chat template.

    Raises:
        UserError: there is no such format, or the template describes none.
    """
    if name == "auto":
        name = guess_format(template)
    if name not in PARSERS:
        raise UserError(f"tool call format {name}: choose one of auto, {', '.join(PARSERS)} or {VLLM}NAME")
    return PARSERS[name]


def guess_format(template: str) -> str:
    """Return the format of the tool calls that a chat template renders.

    Raises:
        UserError: the template renders no tool calls.
    """
    if "<function=" in template:
        return "xml"
    if "<tool_call>" in template:
        return "hermes"
    if "tool_calls" in template or "tools" in template:
        return "json"
    raise UserError(
        "the chat template shows the model no tools, so the format of its calls is unknown: choose one of "
        f"{', '.join(PARSERS)}, and describe tools and format in the system prompt, or set data.chat_template to a "
        "template with tools"
    )


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _decode(text: str, at: int = 0) -> tuple[Any, int | None]:
    """Read the JSON value at a place of a text. Return it and its end, or None for the end if there is none."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, None


def _names_a_tool(value: Any) -> bool:
    return isinstance(value, Mapping) and "name" in value and ("arguments" in value or "parameters" in value)


def _call(value: Any, form: str) -> ToolCall | MalformedCall:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        return MalformedCall(f"the tool call has no name; write it as {form}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models encode the arguments twice
        arguments, _ = _decode(arguments.strip() or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return MalformedCall(f'the "arguments" are no JSON object; write the call as {form}', value["name"])
    return ToolCall(value["name"], arguments)


def _malformed(text: str, form: str) -> MalformedCall:
    try:
        json.loads(text, strict=False)
        problem = "text follows the object"
    except json.JSONDecodeError as error:
        problem = f"{error.msg}, at character {error.pos + 1}"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    return MalformedCall(f"the tool call is not valid JSON ({problem}); write it as {form}")
