"""Prompts in Arrow files: the form of tokenized data for reinforcement learning, `generate` and `eval`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hpc_rl.data.prompts import Prompt, PromptCounts
from hpc_rl.data.reading.formats import Row
from hpc_rl.data.tokenized import Form, ItemBlock, Lists, Unstorable, as_bytes, as_lists


@dataclass(frozen=True)
class Prompts(Form[Prompt]):
    """Prompts, each with its row as JSON."""

    answer_key: str | None
    """Column with the reference answer; None if there is none."""
    counts = PromptCounts

    @property
    def schema(self) -> pa.Schema:
        """The columns of the files."""
        return pa.schema([("token_ids", pa.list_(pa.int32())), ("text", pa.large_binary()), ("row", pa.large_binary())])

    def columns(self, items: Sequence[Prompt]) -> list[pa.Array]:
        return [
            as_lists([prompt.token_ids for prompt in items], np.int32),
            as_bytes([prompt.text.encode("utf-8", "surrogatepass") for prompt in items]),
            as_bytes([_as_json(prompt.row) for prompt in items]),
        ]

    def block(self, batch: pa.RecordBatch) -> PromptBlock:
        return PromptBlock(batch, self.answer_key)


class PromptBlock(ItemBlock[Prompt]):
    """The prompts of a record batch, whose arrays are views of the file."""

    def __init__(self, batch: pa.RecordBatch, answer_key: str | None) -> None:
        self.count = batch.num_rows
        self._answer_key = answer_key
        self._token_ids = Lists(batch.column(0), np.int32)
        self._texts, self._rows = (Lists(batch.column(place), np.uint8, np.int64) for place in (1, 2))

    def item(self, index: int) -> Prompt:
        found: Row = json.loads(self._rows.at(index).tobytes())
        answer = None if self._answer_key is None else found[self._answer_key]
        text = self._texts.at(index).tobytes().decode("utf-8", "surrogatepass")
        return Prompt(self._token_ids.at(index), answer, found, text)


def _as_json(row: Row) -> bytes:
    """Return a row as JSON. Raises Unstorable if JSON cannot represent a value."""
    with contextlib.suppress(TypeError, ValueError):
        text = json.dumps(row)
        if json.loads(text) == row:
            return text.encode()
    name = next((name for name, value in row.items() if not _is_json(value)), None)
    raise Unstorable(f"column {name!r} has a value that JSON cannot represent")


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
