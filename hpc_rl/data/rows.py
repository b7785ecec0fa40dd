"""Rows as chat messages. A login node reads rows with this module before it queues a job."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from hpc_rl.config.prompts import PromptConfig
from hpc_rl.config.sft import DataConfig
from hpc_rl.data.formats import Row, kind_of
from hpc_rl.errors import UserError

Message = dict[str, Any]

PROMPT_COLUMNS = ("prompt", "question", "instruction", "query", "problem", "input")
RESPONSE_COLUMNS = ("response", "completion", "answer", "output", "solution", "target")
CHOSEN_COLUMNS = ("chosen", "preferred", "accepted", "chosen_response", "response_chosen")
REJECTED_COLUMNS = ("rejected", "dispreferred", "rejected_response", "response_rejected")
"""Names that data sets commonly give to a prompt, its response, and a better and a worse one, in the order of
preference."""


def to_messages(row: Row, data: DataConfig, where: str) -> list[Message]:
    """Return the chat of one row: messages with `role` and `content`, at least one of them from the assistant.

    Args:
        where: file and row number, for the error.

    Raises:
        UserError: a column is missing, does not hold a chat, or has no assistant turn.
    """
    if data.prompt_key is not None and data.response_key is not None:
        chat = chat_column(row)
        other = f"data.messages_key={chat} and leave out data.prompt_key and data.response_key" if chat else None
        prompt = column(row, "prompt_key", data.prompt_key, where, other)
        response = column(row, "response_key", data.response_key, where, other)
        if not isinstance(response, str):
            raise UserError(f"{where}: column {data.response_key!r} has {kind_of(response)}; text is needed")
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [*as_chat(asked, data.prompt_key, where), {"role": "assistant", "content": response}]
    if data.messages_key not in row and (pair := pair_columns(row)):
        better = f"data.messages_key={pair[0]}"
        if not _looks_like_chat(row[pair[0]]):
            prompt = known_column(row, PROMPT_COLUMNS) or "COLUMN"
            better = f"data.prompt_key={prompt} data.response_key={pair[0]}"
        raise UserError(
            f"{where}: found a pair of responses (columns {' and '.join(pair)}) where a chat is needed; pairs are for "
            f"hpc-rl submit dpo and rm (data check --kind dpo); to learn from the better response of each, set {better}"
        )
    messages = as_chat(
        column(row, "messages_key", data.messages_key, where, _suggest_columns(row)), data.messages_key, where
    )
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise UserError(f"{where}: no assistant turn to learn from (roles: {roles}); add one or remove the row")
    return messages


def to_prompt(row: Row, data: PromptConfig, where: str) -> tuple[list[Message], Any]:
    """Return the prompt of one row, as a chat that does not end with an assistant turn, and its reference answer.

    Args:
        where: file and row number, for the error.

    Returns:
        at least one message; the value of the answer column, or None if data.answer_key is null.

    Raises:
        UserError: a column is missing, null, or neither text nor a chat; or the prompt is empty.
    """
    suggestion = known_column(row, PROMPT_COLUMNS)
    asked = column(row, "prompt_key", data.prompt_key, where, suggestion and f"data.prompt_key={suggestion}")
    is_text = isinstance(asked, str)
    messages = [{"role": "user", "content": asked}] if is_text else as_chat(asked, data.prompt_key, where)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{where}: column {data.prompt_key!r} has only an assistant turn, so there is no prompt")
    if data.answer_key is None:
        return messages, None
    suggestion = known_column(row, RESPONSE_COLUMNS)
    answer = column(row, "answer_key", data.answer_key, where, suggestion and f"data.answer_key={suggestion}")
    if answer is None:
        raise UserError(
            f"{where}: column {data.answer_key!r} has null; remove the row, or set data.answer_key=null if the "
            "reward needs no answer"
        )
    return messages, answer


def column(row: Row, option: str, key: str, where: str, suggestion: str | None = None) -> Any:
    """Return a column of a row.

    Args:
        suggestion: options to propose if the column is missing and no column has a similar name.

    Raises:
        UserError: the column is missing; the message lists the columns and proposes an option.
    """
    if key in row:
        return row[key]
    columns = sorted(map(str, row))
    close = difflib.get_close_matches(key, columns, n=1)
    if close:
        hint = f"did you mean data.{option}={close[0]}?"
    else:
        hint = f"set {suggestion}" if suggestion else f"set data.{option}"
    raise UserError(f"{where}: no column {key!r} (data.{option}); columns: {', '.join(columns) or 'none'}; {hint}")


def _suggest_columns(row: Row) -> str | None:
    """Return the options that read this row as a chat, or None if its columns have no common names."""
    chat = chat_column(row)
    if chat is not None:
        return f"data.messages_key={chat}"
    prompt = known_column(row, PROMPT_COLUMNS)
    response = known_column(row, RESPONSE_COLUMNS)
    return f"data.prompt_key={prompt} data.response_key={response}" if prompt and response else None


def pair_columns(row: Row) -> tuple[str, str] | None:
    """Return the columns with a better and a worse response, if the row has columns with common names for them."""
    chosen, rejected = known_column(row, CHOSEN_COLUMNS), known_column(row, REJECTED_COLUMNS)
    return (chosen, rejected) if chosen and rejected else None


def chat_column(row: Row) -> str | None:
    return next((key for key, value in row.items() if _looks_like_chat(value)), None)


def known_column(row: Row, names: Iterable[str]) -> str | None:
    """Return the first of some names that a row has as a column, in the row's own spelling."""
    columns = {str(key).lower(): str(key) for key in row}
    return next((columns[name] for name in names if name in columns), None)


def _looks_like_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and "role" in each for each in value)


def as_chat(value: Any, key: str, where: str) -> list[Message]:
    """Return the messages in a column.

    Raises:
        UserError: the value is not a list of messages.
    """
    if isinstance(value, str):
        raise UserError(
            f"{where}: column {key!r} has text, but a list of messages is needed; for columns of text (csv and tsv "
            "have no others) set data.prompt_key and data.response_key"
        )
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: column {key!r} has {kind_of(value)}; a list of messages is needed")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f'{where}: message {number} of {key!r} is not of the form {{"role": ..., "content": ...}}')
        # Columns of structs hold null for a field that a message lacks; templates would print it.
        message = {name: part for name, part in message.items() if part is not None}
        if not isinstance(message.get("content"), str) and "tool_calls" not in message:
            raise UserError(f"{where}: message {number} of {key!r} has no text in `content`")
        messages.append(message)
    return messages
