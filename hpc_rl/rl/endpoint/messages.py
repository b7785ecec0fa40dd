"""What agents request, in the format of OpenAI's chat completions, and how a request continues a conversation.

The format: https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.data.reading.rows import Message

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NEW_ROLES = ("user", "tool")
_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")
"""Parts of a message that chat templates read. Clients add others to the answers that they send back."""
_READ = ("messages", "model", "tools", "max_tokens", "max_completion_tokens", "stream", "stream_options")
IGNORED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("parallel_tool_calls", "reasoning_effort", "verbosity", "user", "safety_identifier", "metadata", "store"),
    *("service_tier", "prompt_cache_key", "prompt_cache_retention"),
)
"""Parameters that have no effect: the run samples all responses in the same way."""
_NEUTRAL: dict[str, Sequence[Any]] = {
    "n": (1,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
"""Values of further parameters that request nothing. None always is one."""
_REPEAT = (
    "The policy is trained on one conversation for each session, so a request has to repeat its messages and the "
    "policy's answers as they were, and add new ones; take another session for another conversation"
)
_SHOWN_CHARS = 40


class Refusal(Exception):
    """A request that is not granted. The message is for the agent: what was requested, what was found, what to do.

    Args:
        status: of HTTP.
        code: the kind of the problem, for programs.
    """

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """Return the answer, in OpenAI's format of errors."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next turn of the policy."""

    messages: list[Message]
    """With text as their content, and objects as arguments of tool calls, as chat templates take them."""
    tools: list[dict[str, Any]]
    max_tokens: int | None = None
    streams: bool = False
    includes_usage: bool = False
    """Whether a stream ends with the number of tokens."""
    ignored: tuple[str, ...] = ()
    """Parameters of the request that have no effect."""

    def repeats(self, other: ChatRequest) -> bool:
        """Return whether this requests the same turn, as clients do after a lost connection."""
        return (self.messages, self.tools, self.max_tokens) == (other.messages, other.tools, other.max_tokens)


def read_chat(body: object) -> ChatRequest:
    """Read the body of a request.

    Raises:
        Refusal: it is none, or requests what the endpoint does not have.
    """
    given = {name: value for name, value in _table(body, "the body").items() if value is not None}
    for name, value in given.items():
        if name in (*_READ, *IGNORED) or value in _NEUTRAL.get(name, ()):
            continue
        possible = f"; set it to {json.dumps(_NEUTRAL[name][0])}, or leave it out" if name in _NEUTRAL else ""
        raise Refusal(f"{name}={_shown(value)} is not supported{possible or '; leave it out'}", code="unsupported")
    messages = [_message(each, f"message {number}") for number, each in enumerate(_list(given, "messages"), start=1)]
    if not messages:
        raise Refusal("the request has no messages: send at least one")
    if messages[-1]["role"] == "assistant":
        raise Refusal("the last message is the assistant's: add a message of the user, or the result of a tool")
    options = _table(given.get("stream_options", {}), "stream_options")
    return ChatRequest(
        messages,
        [_tool(each, f"tool {number}") for number, each in enumerate(_list(given, "tools"), start=1)],
        _most_tokens(given),
        bool(given.get("stream", False)),
        bool(options.get("include_usage", False)),
        tuple(name for name in IGNORED if name in given),
    )


def new_messages(earlier: Sequence[Message], requested: Sequence[Message]) -> list[Message]:
    """Return the messages that a request adds to the earlier ones of its session.

    What the policy wrote is compared by its text and its tool calls. Its tokens are known, and white space at its ends,
    which agents often remove, changes nothing.

    Raises:
        Refusal: the request changes an earlier message, lacks one, or adds none that may follow.
    """
    for number, (before, now) in enumerate(zip(earlier, requested, strict=False), start=1):
        if difference := _difference(before, now):
            raise Refusal(f"message {number} ({before['role']}): {difference}. {_REPEAT}", code="other_messages")
    if len(requested) <= len(earlier):
        raise Refusal(
            f"the session has {len(earlier)} messages, and the request repeats {len(requested)} of them and adds none. "
            f"{_REPEAT}",
            code="other_messages",
        )
    new = list(requested[len(earlier) :])
    for number, message in enumerate(new, start=len(earlier) + 1):
        if message["role"] not in _NEW_ROLES:
            raise Refusal(
                f"message {number} has the role {message['role']}, but only messages of the roles "
                f"{' and '.join(_NEW_ROLES)} may follow an answer of the policy",
                code="other_messages",
            )
    return new


def _difference(before: Message, now: Message) -> str | None:
    """Describe the first difference between a message of the session and the request's; None if there is none."""
    if before["role"] != now["role"]:
        return f"the request has the role {now['role']}"
    is_policys = before["role"] == "assistant"
    old, new = ((each["content"].strip() if is_policys else each["content"]) for each in (before, now))
    if old != new:
        at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        return (
            f"the content differs from character {at + 1} on: the session has {_shown(old[at:])}, and the request "
            f"{_shown(new[at:])}"
        )
    if calls_of(before) != calls_of(now):
        return f"the session has the tool calls {_shown(calls_of(before))}, and the request {_shown(calls_of(now))}"
    others = [] if is_policys else [key for key in ("name", "tool_call_id") if before.get(key) != now.get(key)]
    if others:
        return (
            f"the session has {others[0]} {_shown(before.get(others[0]))}, and the request {_shown(now.get(others[0]))}"
        )
    return None


def calls_of(message: Message) -> list[tuple[str, dict[str, Any]]]:
    """Return name and arguments of each tool call in a message."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


def _message(value: object, where: str) -> Message:
    """Return a message with the parts that chat templates read, and text as its content."""
    given = {key: part for key, part in _table(value, where).items() if part is not None and key in _KEPT}
    role = given.get("role")
    if role not in _ROLES:
        raise Refusal(f"{where} has the role {_shown(role)}: choose one of {', '.join(_ROLES)}")
    calls = [_call(each, where) for each in _list(given, "tool_calls")]
    if calls and role != "assistant":
        raise Refusal(f"{where} has the role {role} and tool_calls, which only the assistant makes: remove them")
    if "content" not in given and not calls:
        raise Refusal(f"{where} has no content: add text")
    content = _text(given.get("content", ""), where)
    # Chat templates have no role of that name.
    own: Message = {"role": "system" if role == "developer" else role, "content": content}
    own |= {key: _string(given[key], f"{key} of {where}") for key in ("name", "tool_call_id") if key in given}
    return {**own, "tool_calls": calls} if calls else own


def _text(content: object, where: str) -> str:
    """Return content as text: it may be a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"{where} has {type(content).__name__} as its content: send text")
    parts = [_table(part, f"a part of {where}") for part in content]
    for part in parts:
        if part.get("type") != "text":
            raise Refusal(f"{where} has a part of type {_shown(part.get('type'))}: the policy reads only text")
    return "\n".join(_string(part.get("text"), f"the text of {where}") for part in parts)


def _call(value: object, where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as chat templates take them."""
    call = _table(value, f"a tool call of {where}")
    function = _table(call.get("function"), f"the function of a tool call of {where}")
    name, arguments = _string(function.get("name"), f"the name of a tool call of {where}"), function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise Refusal(f"{where} calls {name} with arguments that are no JSON object: {_shown(function)}")
    return {"id": str(call.get("id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(value: object, where: str) -> dict[str, Any]:
    """Return what the model sees of a tool."""
    given = _table(value, where)
    if given.get("type", "function") != "function":
        raise Refusal(f"{where} is of type {_shown(given['type'])}: the policy calls only functions")
    function = _table(given.get("function"), f"the function of {where}")
    own: dict[str, Any] = {"name": _string(function.get("name"), f"the name of {where}")}
    own["description"] = _string(function.get("description") or "", f"the description of {where}")
    none = {"type": "object", "properties": {}}
    own["parameters"] = {**none, **_table(function.get("parameters") or {}, f"the parameters of {where}")}
    return {"type": "function", "function": own}


def _most_tokens(given: Mapping[str, Any]) -> int | None:
    found = [given[name] for name in ("max_completion_tokens", "max_tokens") if name in given]
    if any(not isinstance(each, int) or isinstance(each, bool) or each < 1 for each in found):
        raise Refusal(f"max_tokens is {_shown(found[0])}: send a whole number, at least 1, or leave it out")
    return min(found, default=None)


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(f"{where} is {type(value).__name__}: send a JSON object")
    return value


def _list(given: Mapping[str, Any], name: str) -> list[Any]:
    found = given.get(name, [])
    if not isinstance(found, list):
        raise Refusal(f"{name} is {type(found).__name__}: send a list")
    return found


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise Refusal(f"{where} is {type(value).__name__}: send text")
    return value


def _shown(value: object) -> str:
    """Return a value for a message, without the end of a long one."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
