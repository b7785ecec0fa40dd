"""vLLM's parsers of tool calls, for the formats that tool_calls.PARSERS lacks. They need a tokenizer, but no engine.

Importing vLLM takes many seconds, so this module is imported only if such a parser is named. A parser of vLLM returns
the text as an answer if it cannot read a call in it, so malformed calls get no explanation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpc_rl.environments.tool_calls import VLLM, MalformedCall, Parse, ToolCall
from hpc_rl.errors import UserError
from hpc_rl.software.installation import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_vllm_parser(name: str, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Mapping[str, Any]]) -> Parse:
    """Return a parser of vLLM by its name, such as pythonic (https://docs.vllm.ai/en/latest/features/tool_calling).

    Args:
        schemas: the schemas of the tools, by which some parsers convert arguments.

    Raises:
        UserError: vLLM or a package of the parser is missing, there is no such parser, or it refuses the tokenizer.
    """
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager
    except ModuleNotFoundError as error:
        raise UserError(
            f"tool call format {VLLM}{name} needs {error.name}, which is not installed: {install_command('rl')}"
        ) from error
    known = sorted(ToolParserManager.list_registered())
    if name not in known:
        raise UserError(f"tool call format {VLLM}{name}: vLLM has no such parser; choose one of {', '.join(known)}")
    tools = [ChatCompletionToolsParam.model_validate(schema) for schema in schemas]
    try:
        make = ToolParserManager.get_tool_parser(name)
        make(tokenizer, tools)
    except Exception as error:  # each parser has its own checks of the tokenizer
        problem = " ".join(str(error).split())
        raise UserError(f"tool call format {VLLM}{name}: vLLM refuses it for this model: {problem}") from error
    request = ChatCompletionRequest(messages=[], tools=tools or None)

    def parse(text: str) -> list[ToolCall | MalformedCall]:
        try:
            found = make(tokenizer, tools).extract_tool_calls(text, request)
        except Exception as error:  # noqa: BLE001 - no text may end the run
            return [MalformedCall(f"the tool call cannot be read ({type(error).__name__})")]
        return [_call(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse


def _call(name: str, arguments: str) -> ToolCall | MalformedCall:
    try:
        values = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        values = None
    return (
        ToolCall(name, values) if isinstance(values, dict) else MalformedCall("the arguments are no JSON object", name)
    )
