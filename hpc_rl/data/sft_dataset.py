"""Training files as token samples, with the loss on the assistant's tokens alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from hpc_rl.config.sft import DataConfig
from hpc_rl.data.chat import chat_template, marks_generation, render
from hpc_rl.data.rows import Message, to_messages
from hpc_rl.data.sources import all_rows, chunks
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 256  # rows per call of the tokenizer, which spreads them over its threads


@dataclass(frozen=True)
class Sample:
    input_ids: NDArray[np.int32]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L]; true where the token is a target. Never true at 0: nothing predicts the first token."""


@dataclass
class Counts:
    """What one rank's share of the rows became; sums over ranks are the data set's."""

    rows: int = 0
    """Rows read, the dropped ones included."""
    tokens: int = 0
    """Tokens of the kept samples."""
    target_tokens: int = 0
    """Of these, the ones that the loss is taken on."""
    truncated: int = 0
    """Samples cut to data.max_length (and kept)."""
    dropped: int = 0
    """Samples left out for being over data.max_length."""
    no_target: int = 0
    """Samples left out since truncation left no token of the assistant."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)})

    def __str__(self) -> str:
        text = f"{self.rows:,} rows, {self.tokens:,} tokens, {self.target_tokens:,} of them targets"
        lost = {
            "truncated": self.truncated,
            "too long, dropped": self.dropped,
            "no target left, dropped": self.no_target,
        }
        return "; ".join([text, *(f"{count:,} {what}" for what, count in lost.items() if count)])


def tokenize_files(
    files: Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str,
    rank: int = 0,
    world: int = 1,
) -> tuple[list[Sample | None], Counts]:
    """This rank's share of all rows, `rows[rank::world]`, as samples; None stands for a dropped one.

    Args:
        files: parquet or jsonl files, or names of `datasets` data sets.
        split: "train" or "test"; which part of a `datasets` data set to take.

    Raises:
        UserError: bad files or rows (names file and row), or a tokenizer without chat template.
    """
    template = chat_template(tokenizer, data)
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no fast version (tokenizer.json), which is needed"
        )
    encode = _encode_marked if marks_generation(template) else _encode_rendered
    samples: list[Sample | None] = []
    counts = Counts()
    share = islice(all_rows(files, split), rank, None, world)
    for chunk in chunks(share, _BATCH):
        chats = [(to_messages(row, data, where), where) for row, where in chunk]
        for ids, mask in encode(tokenizer, template, chats):
            samples.append(_fitted(ids, mask, data, counts))
    return samples, counts


def _encode_rendered(
    tokenizer: PreTrainedTokenizerBase, template: str, chats: list[tuple[list[Message], str]]
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    texts = [render(tokenizer, template, messages, where) for messages, where in chats]
    batch = dict(tokenizer([chat.text for chat in texts], add_special_tokens=False, return_offsets_mapping=True))
    for chat, ids, offsets in zip(texts, batch["input_ids"], batch["offset_mapping"], strict=True):
        starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in chat.spans:
            mask |= (starts < end) & (ends > start)  # a token across the border has some of the assistant's text
        yield np.asarray(ids, dtype=np.int32), mask


def _encode_marked(
    tokenizer: PreTrainedTokenizerBase, template: str, chats: list[tuple[list[Message], str]]
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    try:
        batch: Any = tokenizer.apply_chat_template(
            [messages for messages, _ in chats],
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except TemplateError as error:
        raise UserError(f"between {chats[0][1]} and {chats[-1][1]}: the chat template refuses: {error}") from error
    for ids, mask in zip(batch["input_ids"], batch["assistant_masks"], strict=True):
        yield np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.bool_)


def _fitted(ids: NDArray[np.int32], mask: NDArray[np.bool_], data: DataConfig, counts: Counts) -> Sample | None:
    """The sample within data.max_length, or None; counted either way."""
    counts.rows += 1
    too_long = len(ids) > data.max_length
    if too_long and data.truncation == "drop":
        counts.dropped += 1
        return None
    ids, mask = ids[: data.max_length].copy(), mask[: data.max_length].copy()
    mask[:1] = False
    if not mask.any():
        counts.no_target += 1
        return None
    counts.truncated += too_long
    counts.tokens += len(ids)
    counts.target_tokens += int(mask.sum())
    return Sample(ids, mask)
