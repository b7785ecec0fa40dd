"""Data files as rows, rows as chat messages, and the checks of both.

Light on purpose (pyarrow only inside functions): a login node checks a run's data before it queues the job.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_rl.config.ppo import PromptDataConfig
from hpc_rl.config.sft import DataConfig
from hpc_rl.errors import UserError

Row = dict[str, Any]
Message = dict[str, Any]

_JSON_LINES = (".jsonl", ".json")
_PARQUET = ".parquet"


class CannotCheck(Exception):
    """The data may be fine, but this machine cannot read it; the message says why."""


def is_file(name: str) -> bool:
    """Whether a name in train_files or val_files is a file to read, rather than a name for the `datasets` library."""
    return name.endswith((*_JSON_LINES, _PARQUET))


def read_rows(file: str | Path) -> Iterator[Row]:
    """The rows of a .jsonl, .json (one object per line) or .parquet file, in order; empty lines are skipped.

    Raises:
        UserError: the file is missing, of another kind, or a line of it is no JSON object (names the line).
        CannotCheck: a parquet file, and pyarrow is not installed.
    """
    path = Path(file).expanduser()
    if path.suffix not in (*_JSON_LINES, _PARQUET):
        raise UserError(f"{path}: not a .jsonl or .parquet file")
    if not path.is_file():
        raise UserError(f"{path}: no such data file")
    yield from _parquet_rows(path) if path.suffix == _PARQUET else _json_rows(path)


def to_messages(row: Row, data: DataConfig, where: str) -> list[Message]:
    """The chat of one row: a list of {"role", "content", ...}, at least one of them from the assistant.

    Args:
        where: file and row number, for the error.

    Raises:
        UserError: a column is missing, is no chat, or has no assistant turn.
    """
    if data.prompt_key is not None and data.response_key is not None:
        prompt = _column(row, "prompt_key", data.prompt_key, where)
        response = _column(row, "response_key", data.response_key, where)
        if not isinstance(response, str):
            raise UserError(f"{where}: column {data.response_key!r} has {_kind(response)}, where text is needed")
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [*_chat(asked, data.prompt_key, where), {"role": "assistant", "content": response}]
    messages = _chat(_column(row, "messages_key", data.messages_key, where), data.messages_key, where)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages) or "none"
        raise UserError(f"{where}: no assistant turn to learn from (roles: {roles}); add one or remove the row")
    return messages


def to_prompt(row: Row, data: PromptDataConfig, where: str) -> tuple[list[Message], Any]:
    """What one row asks, as a chat without a last turn of the assistant, and its reference answer.

    Args:
        where: file and row number, for the error.

    Returns:
        at least one message; the answer as the column has it, None where data.answer_key is null.

    Raises:
        UserError: a column is missing, null, or neither text nor a chat; nothing is asked.
    """
    asked = _column(row, "prompt_key", data.prompt_key, where)
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else _chat(asked, data.prompt_key, where)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{where}: column {data.prompt_key!r} has a turn of the assistant alone, so nothing is asked")
    if data.answer_key is None:
        return messages, None
    answer = _column(row, "answer_key", data.answer_key, where)
    if answer is None:
        raise UserError(
            f"{where}: column {data.answer_key!r} has null; remove the row, or set data.answer_key=null where the "
            "reward needs no answer"
        )
    return messages, answer


def check_file(path: str, data: DataConfig, max_rows: int | None = None) -> int:
    """Read a file's rows as training will read them, the first max_rows of them (None: all).

    Returns:
        The number of rows that were checked, at least 1.

    Raises:
        UserError: what training would stop at, in one line.
        CannotCheck: a `datasets` name, or a parquet file where pyarrow is not installed.
    """
    return _check_rows(path, lambda row, where: to_messages(row, data, where), max_rows)


def check_prompts(path: str, data: PromptDataConfig, max_rows: int | None = None) -> int:
    """What check_file does, for the prompts of reinforcement learning: the same arguments, result and errors."""
    return _check_rows(path, lambda row, where: to_prompt(row, data, where), max_rows)


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


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8 text"
                hint = "; a JSON array? write one object per line" if number == 1 and line.lstrip()[:1] == b"[" else ""
                raise UserError(f"{path}, line {number}: not JSON ({reason}){hint}") from error
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}, line {number}: {_kind(row)}, where an object with the row's columns is needed"
                )
            yield row


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise CannotCheck(f"{path} needs pyarrow, which is not installed here") from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as parquet ({str(error).splitlines()[0]})") from error


def _column(row: Row, option: str, key: str, where: str) -> Any:
    if key in row:
        return row[key]
    columns = sorted(map(str, row))
    close = difflib.get_close_matches(key, columns, n=1)
    hint = f"; did you mean data.{option}={close[0]}?" if close else f"; set data.{option}"
    raise UserError(f"{where}: no column {key!r} (data.{option}); columns: {', '.join(columns) or 'none'}{hint}")


def _chat(value: Any, key: str, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: column {key!r} has {_kind(value)}, where a list of messages is needed")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f'{where}: message {number} of {key!r} is not of the form {{"role": ..., "content": ...}}')
        # Columns of structs hold null where a message lacks a field; templates would print it.
        message = {name: part for name, part in message.items() if part is not None}
        if not isinstance(message.get("content"), str) and "tool_calls" not in message:
            raise UserError(f"{where}: message {number} of {key!r} has no text in `content`")
        messages.append(message)
    return messages


def _kind(value: Any) -> str:
    names = {type(None): "null", str: "text", list: "an empty list" if value == [] else "a list", dict: "an object"}
    return names.get(type(value), "a number")
