from __future__ import annotations

import pytest

from hpc_rl.environments.schemas import make_tool
from hpc_rl.environments.tool_calls import ToolCall
from hpc_rl.errors import UserError
from tests.helpers import make_tokenizer


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def test_parsers_of_vllm_work_without_an_engine() -> None:
    pytest.importorskip("vllm")
    from hpc_rl.environments.vllm_parsers import load_vllm_parser

    tokenizer, schemas = make_tokenizer(320), [make_tool("test", "add", add).schema]
    parse = load_vllm_parser("pythonic", tokenizer, schemas)
    assert parse("[add(a=1, b=2), add(a=3, b=4)]") == [
        ToolCall("add", {"a": 1, "b": 2}),
        ToolCall("add", {"a": 3, "b": 4}),
    ]
    assert parse("no call") == parse("[add(a=1") == parse("") == []
    parse = load_vllm_parser("hermes", tokenizer, schemas)
    assert parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>') == [ToolCall("add", {"a": 1})]
    with pytest.raises(UserError, match=r"no such parser; choose one of .*hermes"):
        load_vllm_parser("no", tokenizer, schemas)
    with pytest.raises(UserError, match=r"refuses it for this model: .*DeepSeek"):
        load_vllm_parser("deepseek_v3", tokenizer, schemas)
