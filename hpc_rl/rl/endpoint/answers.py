"""What the endpoint answers: a turn of the policy in the format of OpenAI's chat completions, whole or as a stream.

The formats: https://platform.openai.com/docs/api-reference/chat/object and .../chat/streaming
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpc_rl.data.reading.rows import Message
from hpc_rl.rl.endpoint.messages import ChatRequest

MODEL = "policy"
"""Name of the model in answers. A request may have any other."""


@dataclass(frozen=True)
class Answer:
    """A turn of the policy."""

    name: str
    """Of the answer: clients log it."""
    created_s: int
    """Time of the answer, in seconds since the epoch."""
    message: Message
    """With arguments of tool calls as objects, as in ChatRequest."""
    thinking: str
    """What the policy wrote before the message."""
    finished: bool
    """Whether the policy ended its turn itself."""
    prompt_tokens: int
    tokens: int
    """Those of the turn."""

    @property
    def reason(self) -> str:
        """Why the turn ended, as OpenAI names it."""
        if not self.finished:
            return "length"
        return "tool_calls" if "tool_calls" in self.message else "stop"

    def body(self, request: ChatRequest) -> dict[str, Any]:
        """Return the answer to a request."""
        choice = {"index": 0, "message": self._message(), "finish_reason": self.reason, "logprobs": None}
        ignored = {"ignored": list(request.ignored)} if request.ignored else {}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage(), **ignored}

    def events(self, request: ChatRequest) -> str:
        """Return the answer as a stream of server-sent events, which come all at once, when the turn is complete."""
        chunks = list(self._chunks())
        if request.includes_usage:
            chunks = [{**chunk, "usage": None} for chunk in chunks]
            chunks.append({**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()})
        if request.ignored:
            chunks[0]["ignored"] = list(request.ignored)
        lines = [*(json.dumps(chunk, ensure_ascii=False) for chunk in chunks), "[DONE]"]
        return "".join(f"data: {line}\n\n" for line in lines)

    def _chunks(self) -> Iterator[dict[str, Any]]:
        delta = self._message()
        for index, call in enumerate(delta.get("tool_calls", [])):
            call["index"] = index
        for part, reason in ((delta, None), ({}, self.reason)):
            choice = {"index": 0, "delta": part, "finish_reason": reason, "logprobs": None}
            yield {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created_s, "model": MODEL}

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens, "total_tokens": total}

    def _message(self) -> dict[str, Any]:
        calls = [{**call, "function": _as_sent(call["function"])} for call in self.message.get("tool_calls", [])]
        message = {"role": "assistant", "content": self.message["content"] or (None if calls else "")}
        thinking = {"reasoning_content": self.thinking} if self.thinking else {}
        return {**message, **thinking, **({"tool_calls": calls} if calls else {})}


def models() -> dict[str, Any]:
    """Return the list of models."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "hpc-rl"}]}


def _as_sent(function: dict[str, Any]) -> dict[str, str]:
    """Return a function call with its arguments as text, as OpenAI has them."""
    return {"name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
