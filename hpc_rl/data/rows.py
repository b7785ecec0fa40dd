"""Rows as chat messages, and the checks of both that a login node makes before it queues a job."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_rl.config.ppo import PromptDataConfig
from hpc_rl.config.sft import DataConfig
from hpc_rl.data.formats import CannotCheck, Row, is_file, kind_of, read_rows
from hpc_rl.errors import UserError

Message = dict[str, Any]

_PROMPT_COLUMNS = ("prompt", "question", "instruction", "query", "problem", "input")
_RESPONSE_COLUMNS = ("response", "completion", "answer", "output", "solution", "target")
"""Names that data sets commonly give to a prompt and its response, in the order of preference."""


def to_messages(row: Row, data: DataConfig, where: str) -> list[Message]:
    """Return the chat of one row: messages with `role` and `content`, at least one of them from the assistant.

    Args:
        where: file and row number, for the error.

    Raises:
        UserError: a column is missing, does not hold a chat, or has no assistant turn.
    """
    if data.prompt_key is not None and data.response_key is not None:
        chat = _chat_column(row)
        other = f"data.messages_key={chat} and leave out data.prompt_key and data.response_key" if chat else None
        prompt = _column(row, "prompt_key", data.prompt_key, where, other)
        response = _column(row, "response_key", data.response_key, where, other)
        if not isinstance(response, str):
            raise UserError(f"{where}: column {data.response_key!r} has {kind_of(response)}; text is needed")
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [*_chat(asked, data.prompt_key, where), {"role": "assistant", "content": response}]
    messages = _chat(
        _column(row, "messages_key", data.messages_key, where, _suggest_columns(row)), data.messages_key, where
    )
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise UserError(f"{where}: no assistant turn to learn from (roles: {roles}); add one or remove the row")
    return messages


def to_prompt(row: Row, data: PromptDataConfig, where: str) -> tuple[list[Message], Any]:
    """Return the prompt of one row, as a chat that does not end with an assistant turn, and its reference answer.

    Args:
        where: file and row number, for the error.

    Returns:
        at least one message; the value of the answer column, or None if data.answer_key is null.

    Raises:
        UserError: a column is missing, null, or neither text nor a chat; or the prompt is empty.
    """
    suggestion = _known(row, _PROMPT_COLUMNS)
    asked = _column(row, "prompt_key", data.prompt_key, where, suggestion and f"data.prompt_key={suggestion}")
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else _chat(asked, data.prompt_key, where)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{where}: column {data.prompt_key!r} has only an assistant turn, so there is no prompt")
    if data.answer_key is None:
        return messages, None
    suggestion = _known(row, _RESPONSE_COLUMNS)
    answer = _column(row, "answer_key", data.answer_key, where, suggestion and f"data.answer_key={suggestion}")
    if answer is None:
        raise UserError(
            f"{where}: column {data.answer_key!r} has null; remove the row, or set data.answer_key=null if the "
            "reward needs no answer"
        )
    return messages, answer


def check_file(path: str, data: DataConfig, max_rows: int | None = None) -> int:
    """Read the first max_rows rows of a file (None: all) as training will read them.

    Returns:
        The number of rows that were checked, at least 1.

    Raises:
        UserError: what training would stop at, in one line.
        CannotCheck: the path is a `datasets` name, or a parquet file and pyarrow is not installed.
    """
    return _check_rows(path, lambda row, where: to_messages(row, data, where), max_rows)


def check_prompts(path: str, data: PromptDataConfig, max_rows: int | None = None) -> int:
    """Do the same as check_file for the prompts of reinforcement learning."""
    return _check_rows(path, lambda row, where: to_prompt(row, data, where), max_rows)


def check_batch_size(rows: int, batch_size: int) -> None:
    """Check that the training data fills at least one batch.

    Args:
        rows: rows of all training files together.
        batch_size: data.train_batch_size.

    Raises:
        UserError: there are fewer rows than that.
    """
    if batch_size > rows:
        raise UserError(
            f"data.train_batch_size {batch_size:,} is larger than the training data ({rows:,} rows): "
            f"set it to at most {rows}, or add data"
        )


def _check_rows(path: str, check: Callable[[Row, str], object], max_rows: int | None) -> int:
    if not is_file(path):
        if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().exists():
            raise UserError(f"{path}: no such file or folder")
        raise CannotCheck(f"{path} is a `datasets` name")
    checked = 0
    for checked, row in enumerate(islice(read_rows(path), max_rows), start=1):
        check(row, f"{path}, row {checked}")
    if not checked:
        raise UserError(f"{path}: the data set is empty")
    return checked


def _column(row: Row, option: str, key: str, where: str, suggestion: str | None = None) -> Any:
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
    chat = _chat_column(row)
    if chat is not None:
        return f"data.messages_key={chat}"
    prompt = _known(row, _PROMPT_COLUMNS)
    response = _known(row, _RESPONSE_COLUMNS)
    return f"data.prompt_key={prompt} data.response_key={response}" if prompt and response else None


def _chat_column(row: Row) -> str | None:
    return next((key for key, value in row.items() if _looks_like_chat(value)), None)


def _known(row: Row, names: Iterable[str]) -> str | None:
    """Return the first of some names that a row has as a column, in the row's own spelling."""
    columns = {str(key).lower(): str(key) for key in row}
    return next((columns[name] for name in names if name in columns), None)


def _looks_like_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and "role" in each for each in value)


def _chat(value: Any, key: str, where: str) -> list[Message]:
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
