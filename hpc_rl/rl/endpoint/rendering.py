"""How the messages of agents become tokens, and the tokens of the policy a message."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.reading.rows import Message
from hpc_rl.environments.protocol import readable
from hpc_rl.environments.tool_calls import VLLM, MalformedCall, Parse, ToolCall, after_thinking, find_parser
from hpc_rl.environments.turns import Turns
from hpc_rl.environments.vllm_parsers import load_vllm_parser
from hpc_rl.errors import UserError
from hpc_rl.rl.endpoint.messages import Refusal
from hpc_rl.rl.rollout.engine import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]
_SHOWN_CHARS = 300
_MOST_SETS = 64
"""Different sets of tools for which templates and parsers are kept."""
_FIRST_CALL = re.compile(r"<tool_call>|<function=|<\|python_tag\|>|^[ \t]*(?:```|[\[{])", re.MULTILINE)
"""Where the first tool call begins, in the formats of `hpc_rl.environments.tool_calls`."""


class Rendering:
    """Messages to tokens and back. It is for one thread at a time.

    Args:
        tokenizer: with the run's chat template.

    Raises:
        UserError: there is no such parser of tool calls as agent.tool_format.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PpoConfig) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # other threads use the run's
        self._template = self._tokenizer.get_chat_template()
        self._config = config
        # By JSON, because sets of tools cannot be keys.
        self._turns = lru_cache(_MOST_SETS)(self._new_turns)
        self._parsers = lru_cache(_MOST_SETS)(self._new_parser)
        if config.agent.tool_format != "auto":  # a parser of vLLM takes seconds to import
            self._parsers("[]")

    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids of a conversation up to the start of the policy's first turn.

        Raises:
            Refusal: the chat template or the format of tool calls does not fit.
        """
        with _refusing():
            if tools:
                self._parsers(json.dumps(tools))
            return self._turns(json.dumps(tools), ()).prompt_ids(messages)

    def added_ids(self, turn: Completion, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids between a turn of the policy and its next one.

        Raises:
            Refusal: the chat template does not fit the messages, or renders earlier turns differently.
        """
        roles = tuple(sorted({str(message["role"]) for message in messages}))
        with _refusing():
            return self._turns(json.dumps(tools), roles).added_ids(turn.token_ids.tolist(), messages)

    def read(self, turn: Completion, tools: Tools) -> tuple[str, str, list[ToolCall | MalformedCall]]:
        """Return the thinking, the text before the first tool call, and the tool calls of a turn.

        If no call can be read, the text is all that follows the thinking.
        """
        # Formats of tool calls have special tokens; the last token of a turn is the one that ends it.
        ids = turn.token_ids[:-1] if turn.finished else turn.token_ids
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        assert isinstance(text, str)
        visible = after_thinking(text, self._turns(json.dumps(tools), ()).opens_thinking)
        thinking = text[: len(text) - len(visible)].strip().removeprefix("<think>").removesuffix("</think>").strip()
        found = self._parsers(json.dumps(tools))(visible) if tools and turn.finished else []
        calls: list[ToolCall | MalformedCall] = [
            _typed(call, tools) if isinstance(call, ToolCall) else call for call in found
        ]
        if any(isinstance(call, ToolCall) for call in calls):
            visible = _FIRST_CALL.split(visible, maxsplit=1)[0]
        return thinking, visible.strip(), calls

    def _new_turns(self, tools: str, roles: tuple[str, ...]) -> Turns:
        variables = self._config.data.chat_template_kwargs
        return Turns(self._tokenizer, self._template, json.loads(tools), variables, roles)

    def _new_parser(self, tools: str) -> Parse:
        name = self._config.agent.tool_format
        if name.startswith(VLLM):
            return load_vllm_parser(name.removeprefix(VLLM), self._tokenizer, json.loads(tools))
        return find_parser(name, self._template)


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse the request if the block raises an error: chat templates, tokenizers and parsers may raise any."""
    try:
        yield
    except UserError as error:
        raise Refusal(str(error), code="chat_template") from error
    except Exception as error:
        raise Refusal(f"the messages or tools cannot be tokenized: {one_line(error)}", code="chat_template") from error


def one_line(error: Exception) -> str:
    """Return an error of another library for a message."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN_CHARS]


def _typed(call: ToolCall, tools: Tools) -> ToolCall:
    """Return a call whose text can be sent. Text is read as JSON where the tool takes none: some formats of calls have
    only text."""
    schemas = [tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == call.name]
    properties = schemas[0].get("properties", {}) if schemas else {}

    def typed(name: str, value: Any) -> Any:
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        if not isinstance(value, str) or not isinstance(schema, Mapping) or _takes_text(schema):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value

    return ToolCall(readable(call.name), readable({name: typed(name, value) for name, value in call.arguments.items()}))


def _takes_text(schema: Mapping[str, Any]) -> bool:
    """Return whether text is a value of a JSON schema, or the schema does not tell."""
    kinds = schema.get("type") or ()
    kinds = [kinds] if isinstance(kinds, str) else kinds
    choices = [each for key in ("anyOf", "oneOf") for each in schema.get(key) or () if isinstance(each, Mapping)]
    return "string" in kinds or any(map(_takes_text, choices)) or not (kinds or choices)
