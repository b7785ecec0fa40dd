"""Rows as chat messages. A login node reads rows with this module before it queues a job."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from hpc_rl.config.rl.prompts import PromptConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.reading.formats import Row, kind_of
from hpc_rl.data.reading.shapes import shape_of
from hpc_rl.data.templates.messages import CONVERT, TRAIN, Message, as_chat, from_json, with_system
from hpc_rl.errors import UserError

PROMPT_COLUMNS = ("prompt", "question", "instruction", "query", "problem", "input")
RESPONSE_COLUMNS = ("response", "completion", "answer", "output", "solution", "target")
CHOSEN_COLUMNS = ("chosen", "preferred", "accepted", "chosen_response", "response_chosen")
REJECTED_COLUMNS = ("rejected", "dispreferred", "rejected_response", "response_rejected")
"""Names that data sets commonly give to a prompt, its response, and a better and a worse one, in the order of
preference."""
_READ_BY_OPTIONS = ("prompt-completion",)
"""Shapes of rows that options can read too."""
_ALPACA_PARTS = ("input", "history")
"""Columns that belong to the prompt if it is in the column `instruction`."""


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
        _refuse_left_out(row, data.prompt_key, data.response_key, where)
        answer = as_turns(response, "assistant", data.response_key, where)
        if answer[0]["role"] != "assistant":
            raise UserError(
                f"{where}: column {data.response_key!r} begins with a turn of the {answer[0]['role']}, so it is not a "
                f"response; if it is a whole chat, set data.messages_key={data.response_key} instead"
            )
        messages = [*unlearned(as_turns(prompt, "user", data.prompt_key, where)), *answer]
        return with_system(messages, row, (data.prompt_key, data.response_key), where)
    if data.messages_key not in row and shape_of(row) is None and (pair := pair_columns(row)):
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
    return with_system(messages, row, (data.messages_key,), where)


def as_turns(value: Any, role: str, key: str, where: str) -> list[Message]:
    """Return a column as messages: a list of messages, or text as one message of this role."""
    parsed = from_json(value)
    if not isinstance(parsed, str | list | Mapping):
        raise UserError(f"{where}: column {key!r} has {kind_of(parsed)}; text or a list of messages is needed")
    is_chat = not isinstance(parsed, str) and (not isinstance(value, str) or _looks_like_chat(parsed))
    return as_chat(parsed, key, where) if is_chat else [{"role": role, "content": value}]


def unlearned(messages: list[Message]) -> list[Message]:
    """Return messages whose turns of the assistant carry no loss."""
    return [{**message, TRAIN: False} if message["role"] == "assistant" else message for message in messages]


def _refuse_left_out(row: Row, prompt_key: str, answer_key: str | None, where: str) -> None:
    """Raise UserError if the prompt has a second part, as in Alpaca's rows."""
    left_out = [name for name in _ALPACA_PARTS if row.get(name) and name != answer_key]
    if prompt_key == "instruction" and left_out:
        raise UserError(
            f"{where}: data.prompt_key=instruction leaves out the column {left_out[0]!r}, which belongs to the prompt "
            f"in Alpaca's form: {CONVERT}"
        )


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
    _refuse_left_out(row, data.prompt_key, data.answer_key, where)
    messages = as_turns(asked, "user", data.prompt_key, where)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{where}: column {data.prompt_key!r} has only an assistant turn, so there is no prompt")
    messages = with_system(messages, row, data.columns, where)
    if data.answer_key is None:
        return messages, None
    suggestion = known_column(row, RESPONSE_COLUMNS)
    answer = column(row, "answer_key", data.answer_key, where, suggestion and f"data.answer_key={suggestion}")
    if answer is None or answer != answer:  # pandas writes NaN for what is missing
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
    shape = shape_of(row)
    is_labelled = shape == "kto" and option == "response_key"  # options can read it
    if shape is not None and shape not in _READ_BY_OPTIONS and not is_labelled:
        hint = f"these are rows of the shape {shape}: {CONVERT}"
    elif close:
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
