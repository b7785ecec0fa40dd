"""Chat rows as token sequences, with the loss only on the assistant's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from hpc_rl.config.finetune import FinetuneDataConfig
from hpc_rl.config.sft import DataConfig
from hpc_rl.data.chat import chat_template, render
from hpc_rl.data.formats import Row
from hpc_rl.data.rows import Message, to_messages
from hpc_rl.data.sources import BLOCK_ROWS, chunks
from hpc_rl.data.template import RENDER_S, marks_generation
from hpc_rl.errors import UserError
from hpc_rl.host.bounds import cpu_seconds
from hpc_rl.host.counted import counted
from hpc_rl.host.heartbeat import heart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoder = Callable[[list[tuple[list[Message], str]]], Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]]
"""Chats with their places for errors -> the token ids of each, and which of them the assistant wrote."""


@dataclass(frozen=True)
class Sample:
    """One row of training data as tokens."""

    input_ids: NDArray[np.int32]
    """[L]"""
    loss_mask: NDArray[np.bool_]
    """[L]; true if the token is a target. Never true at 0, because nothing predicts the first token."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The sample itself: what a micro-batch cannot divide."""
        return (self,)


@dataclass
class Counts:
    """What the rows of one rank became; the sum over ranks describes the whole data set."""

    rows: int = 0
    """Rows read, including the dropped ones."""
    tokens: int = 0
    """Tokens of the kept samples."""
    target_tokens: int = 0
    """Tokens of the kept samples that carry loss."""
    truncated: int = 0
    """Samples cut to data.max_length (and kept)."""
    dropped: int = 0
    """Samples left out because they are longer than data.max_length."""
    no_target: int = 0
    """Samples left out because no token of the assistant is left."""
    equal: int = 0
    """Pairs left out because both responses are the same."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)})

    def __str__(self) -> str:
        text = f"{counted(self.rows, 'row')}, {counted(self.tokens, 'token')}, {self.target_tokens:,} of them targets"
        lost = {
            "truncated": self.truncated,
            "too long, dropped": self.dropped,
            "no target left, dropped": self.no_target,
            "with equal responses, dropped": self.equal,
        }
        return "; ".join([text, *(f"{count:,} {what}" for what, count in lost.items() if count)])


def chat_tokenizer(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Iterable[tuple[Row, str]]], tuple[list[Sample | None], Counts]]:
    """Return the function that tokenizes rows, each given with its place for errors.

    It returns one sample per row, None for a dropped row, and the counts of both. It raises UserError if a row is not a
    chat.

    Raises:
        UserError: the tokenizer has no chat template or no fast version.
    """
    encode = encoder(tokenizer, data)

    def tokenize(rows: Iterable[tuple[Row, str]]) -> tuple[list[Sample | None], Counts]:
        samples: list[Sample | None] = []
        counts = Counts()
        for chunk in chunks(rows, BLOCK_ROWS):
            heart.beat()
            for ids, mask in encode([(to_messages(row, data, where), where) for row, where in chunk]):
                samples.append(_fitted(ids, mask, data, counts))
        return samples, counts

    return tokenize


def encoder(tokenizer: PreTrainedTokenizerBase, data: FinetuneDataConfig) -> Encoder:
    """Return the function that tokenizes chats.

    Raises:
        UserError: the tokenizer has no chat template or no fast version.
    """
    template = chat_template(tokenizer, data)
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no fast version (tokenizer.json), which training needs"
        )
    encode = _encode_marked if marks_generation(template) else _encode_rendered
    return lambda chats: encode(tokenizer, template, chats)


def _encode_rendered(
    tokenizer: PreTrainedTokenizerBase, template: str, chats: list[tuple[list[Message], str]]
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    texts = [render(tokenizer, template, messages, where) for messages, where in chats]
    encoded = dict(tokenizer([chat.text for chat in texts], add_special_tokens=False, return_offsets_mapping=True))
    for chat, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in chat.spans:
            mask |= (starts < end) & (ends > start)  # a token across the border contains some of the assistant's text
        yield np.asarray(ids, dtype=np.int32), mask


def _encode_marked(
    tokenizer: PreTrainedTokenizerBase, template: str, chats: list[tuple[list[Message], str]]
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    try:
        with cpu_seconds(RENDER_S * len(chats), "it"):
            encoded: Any = tokenizer.apply_chat_template(
                [messages for messages, _ in chats],
                chat_template=template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
    except (TemplateError, TypeError, TimeoutError) as error:
        place = chats[0][1] if len(chats) == 1 else f"between {chats[0][1]} and {chats[-1][1]}"
        raise UserError(f"{place}: the chat template rejects a conversation: {error}") from error
    for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
        yield np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.bool_)


def _fitted(ids: NDArray[np.int32], mask: NDArray[np.bool_], data: DataConfig, counts: Counts) -> Sample | None:
    """Return the sample cut to data.max_length, or None if it is dropped; add it to the counts in both cases."""
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
