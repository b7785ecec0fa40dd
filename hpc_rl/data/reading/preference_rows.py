"""Rows of preferences as chats: a better and a worse response to the same prompt, or one response with its labels.

A login node reads rows with this module before it queues a job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hpc_rl.config.training.preferences import PreferenceDataConfig, RewardDataConfig
from hpc_rl.data.reading.formats import Row, kind_of
from hpc_rl.data.reading.rows import (
    CHOSEN_COLUMNS,
    PROMPT_COLUMNS,
    REJECTED_COLUMNS,
    RESPONSE_COLUMNS,
    as_turns,
    chat_column,
    column,
    known_column,
    pair_columns,
)
from hpc_rl.data.reading.shapes import shape_of
from hpc_rl.data.templates.messages import CONVERT, Message, with_system
from hpc_rl.errors import UserError

_LABEL_COLUMNS = ("label", "score", "rating")
_PAIRS = ("hh", "sharegpt-pair", "openai-preference")
"""Shapes of rows with pairs in other forms."""
_TRUTH = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True)
class PairRow:
    """Two chats with a common beginning."""

    chosen: list[Message]
    rejected: list[Message]
    common: int
    """Messages that both begin with: the prompt."""
    margin: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether both chats are the same, so that there is nothing to learn."""
        return self.chosen == self.rejected


@dataclass(frozen=True)
class LabelledRow:
    """A chat that ends with a response, and the labels of that response."""

    messages: list[Message]
    labels: tuple[float, ...]
    """One for each of `PreferenceDataConfig.labels`."""


def to_preference(row: Row, data: PreferenceDataConfig, where: str) -> PairRow | LabelledRow:
    """Return the pair of a row or, if there are columns with labels, its response with these.

    Args:
        where: file and row number, for the error.

    Raises:
        UserError: a column is missing or holds something else; or the chats of a pair have no prompt in common.
    """
    return to_labelled(row, data, where) if data.labels else to_pair(row, data, where)


def to_pair(row: Row, data: PreferenceDataConfig, where: str) -> PairRow:
    """Return the pair of a row; see `to_preference`."""
    if data.chosen_key == "chosen" and (shape := shape_of(row)) in _PAIRS:
        raise UserError(f"{where}: these are rows of the shape {shape}: {CONVERT}")
    chat = chat_column(row)
    if data.chosen_key not in row and pair_columns(row) is None and chat and row[chat][-1]["role"] == "assistant":
        raise UserError(
            f"{where}: found one chat (column {chat}) where a pair of responses is needed; chats are for hpc-rl submit "
            "sft; if other columns have the pair, name them with data.chosen_key and data.rejected_key"
        )
    chosen = _whole_chat(row, "chosen_key", data.chosen_key, CHOSEN_COLUMNS, data, where)
    rejected = _whole_chat(row, "rejected_key", data.rejected_key, REJECTED_COLUMNS, data, where)
    both = zip(chosen, rejected, strict=False)
    common = next((i for i, (ours, theirs) in enumerate(both) if ours != theirs), min(len(chosen), len(rejected)))
    pair = PairRow(chosen, rejected, common, _margin(row, data, where))
    if pair.is_equal:
        return pair
    if not common:
        raise UserError(
            f"{where}: {data.chosen_key!r} and {data.rejected_key!r} begin with different messages, so they do not "
            "answer the same prompt; both need the same prompt"
        )
    for key, messages in ((data.chosen_key, chosen), (data.rejected_key, rejected)):
        role = messages[common]["role"] if common < len(messages) else None
        if role != "assistant":
            found = "ends there" if role is None else f"goes on with a turn of the {role}"
            raise UserError(
                f"{where}: after {common} messages that both chats have, {key!r} {found}; the first difference has to "
                "be the assistant's response"
            )
    return pair


def to_labelled(row: Row, data: PreferenceDataConfig, where: str) -> LabelledRow:
    """Return the response of a row with its labels; see `to_preference`."""
    messages = _whole_chat(row, "response_key", data.response_key, RESPONSE_COLUMNS, data, where)
    option = "label_key" if data.label_key is not None else "label_keys"
    return LabelledRow(messages, tuple(_label(row, option, key, data, where) for key in data.labels))


def _label(row: Row, option: str, key: str, data: PreferenceDataConfig, where: str) -> float:
    suggested = _suggested(row, option, _LABEL_COLUMNS) if option == "label_key" else None
    value = column(row, option, key, where, suggested)
    label = _TRUTH.get(value.strip().lower(), value) if isinstance(value, str) else value
    number = _number(label, key, where)
    if not isinstance(data, RewardDataConfig) and number not in (0.0, 1.0):
        raise UserError(f"{where}: column {key!r} has {value!r}; a label is true or false (1 or 0)")
    return number


def _margin(row: Row, data: PreferenceDataConfig, where: str) -> float:
    if not isinstance(data, RewardDataConfig) or data.margin_key is None:
        return 0.0
    return _number(column(row, "margin_key", data.margin_key, where), data.margin_key, where)


def _number(value: Any, key: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        found = repr(value) if isinstance(value, str | float) else kind_of(value)
        raise UserError(f"{where}: column {key!r} has {found}; a finite number is needed")
    return number


def _whole_chat(
    row: Row, option: str, key: str, names: tuple[str, ...], data: PreferenceDataConfig, where: str
) -> list[Message]:
    """Return prompt and response as one chat, which ends with the assistant's turn."""
    response = column(row, option, key, where, _suggested(row, option, names))
    answer = as_turns(response, "assistant", key, where)
    if answer[-1]["role"] != "assistant":
        raise UserError(
            f"{where}: column {key!r} ends with a turn of the {answer[-1]['role']}, so it has no response; name the "
            f"column with the response (data.{option})"
        )
    # A chat that begins with another role has the prompt in it, whatever the column of the prompt repeats.
    chat = answer if answer[0]["role"] != "assistant" else [*_prompt(row, data, where), *answer]
    return with_system(chat, row, data.columns, where)


def _prompt(row: Row, data: PreferenceDataConfig, where: str) -> list[Message]:
    found = column(row, "prompt_key", data.prompt_key, where, _suggested(row, "prompt_key", PROMPT_COLUMNS))
    prompt = as_turns(found, "user", data.prompt_key, where)
    if prompt[-1]["role"] == "assistant":
        raise UserError(
            f"{where}: column {data.prompt_key!r} (data.prompt_key) ends with a turn of the assistant, so it is not a "
            "prompt: the columns may be swapped"
        )
    return prompt


def _suggested(row: Row, option: str, names: tuple[str, ...]) -> str | None:
    found = known_column(row, names)
    return found and f"data.{option}={found}"
