"""Chat rows as token sequences, with the loss only on the assistant's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from hpc_rl.config.training.finetune import FinetuneDataConfig
from hpc_rl.config.training.sft import DataConfig
from hpc_rl.data.reading.formats import Row
from hpc_rl.data.reading.rows import to_messages
from hpc_rl.data.reading.sources import BLOCK_ROWS, chunks
from hpc_rl.data.templates.assistant_text import ChatText
from hpc_rl.data.templates.chat import as_text, chat_template, render, turn_ends
from hpc_rl.data.templates.jinja_rendering import RENDER_S, marks_generation
from hpc_rl.data.templates.messages import TRAIN, Chat, Message, extras, fields_without_effect, without_effect
from hpc_rl.data.templates.template_forms import forms_of, unused
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.software.bounds import cpu_seconds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Encoded(NamedTuple):
    """A chat as tokens."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """The tokens that the assistant wrote, without turns that are not to be learned."""
    unused: dict[str, int]
    """Fields that the template leaves out; see `unused` in template_forms.py."""


Encoder = Callable[[list[Chat]], Iterator[Encoded]]
_Tokens = tuple[NDArray[np.int32], NDArray[np.bool_], str | None]
"""Token ids, which of them the assistant wrote, and the text, if it is known."""


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
    unused: dict[str, int] = field(default_factory=dict)
    """Fields without effect on the text, such as those that the chat template does not render, with their numbers."""

    def __add__(self, other: Counts) -> Counts:
        numbers = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts) if f.name != "unused"}
        return Counts(**numbers, unused=dict(Counter(self.unused) + Counter(other.unused)))

    def add_unused(self, fields_: Mapping[str, int], columns: Iterable[str] = ()) -> None:
        """Count fields and columns without effect."""
        self.unused = dict(Counter(self.unused) + Counter(fields_) + Counter(columns))

    def __str__(self) -> str:
        text = f"{counted(self.rows, 'row')}, {counted(self.tokens, 'token')}, {self.target_tokens:,} of them targets"
        lost = {
            "truncated": self.truncated,
            "too long, dropped": self.dropped,
            "no target left, dropped": self.no_target,
            "with equal responses, dropped": self.equal,
        }
        return "; ".join(
            [text, *(f"{count:,} {what}" for what, count in lost.items() if count), *fields_without_effect(self.unused)]
        )


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
            chats = [Chat(to_messages(row, data, where), where, extras(row, where)) for row, where in chunk]
            for encoded, (row, _) in zip(encode(chats), chunk, strict=True):
                samples.append(_fitted(encoded.ids, encoded.mask, data, counts))
                counts.add_unused(encoded.unused, without_effect(row, data.columns))
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
    ends = None if marks_generation(template) else turn_ends(tokenizer, template)

    def tokens_of(chats: list[Chat]) -> Iterator[_Tokens]:
        if ends is None:
            return _encode_marked(tokenizer, template, chats)
        return _encode_rendered(tokenizer, [render(tokenizer, template, chat, ends) for chat in chats])

    def encode(chats: list[Chat]) -> Iterator[Encoded]:
        for chat, (ids, mask, text) in zip(chats, tokens_of(chats), strict=True):
            unused = unused_of(tokenizer, template, chat, text)
            yield Encoded(ids, _without_excluded(mask, chat), unused)

    return encode


def unused_of(tokenizer: PreTrainedTokenizerBase, template: str, chat: Chat, text: str | None) -> dict[str, int]:
    """Return the fields of a chat that its template leaves out; see `unused` in template_forms.py."""

    def text_of(messages: list[Message], tools: list[Any]) -> str:
        return as_text(tokenizer, template, messages, chat.where, False, tools, chat.extras.variables)

    return unused(text, chat.messages, chat.extras.tools, text_of, chat.where)


def _without_excluded(mask: NDArray[np.bool_], chat: Chat) -> NDArray[np.bool_]:
    """Return the mask without the turns that are marked as not to be learned."""
    learned = [message.get(TRAIN, True) for message in chat.messages if message["role"] == "assistant"]
    if all(learned):
        return mask
    starts = np.flatnonzero(np.diff(mask, prepend=False) & mask)
    if len(starts) != len(learned):
        raise UserError(
            f"{chat.where}: some turns are not to be learned, but the chat template renders {len(learned)} turns of "
            f"the assistant as {len(starts)} parts; use another template (data.chat_template), or remove these turns"
        )
    turn = np.cumsum(np.isin(np.arange(len(mask)), starts)) - 1
    return mask & np.asarray(learned)[turn]


def _encode_rendered(tokenizer: PreTrainedTokenizerBase, texts: list[ChatText]) -> Iterator[_Tokens]:
    encoded = dict(tokenizer([chat.text for chat in texts], add_special_tokens=False, return_offsets_mapping=True))
    for chat, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in chat.spans:
            mask |= (starts < end) & (ends > start)  # a token across the border contains some of the assistant's text
        yield np.asarray(ids, dtype=np.int32), mask, chat.text


def _encode_marked(tokenizer: PreTrainedTokenizerBase, template: str, chats: list[Chat]) -> Iterator[_Tokens]:
    forms = forms_of(template)
    for added, group in groupby(chats, key=lambda chat: chat.extras):
        alike = list(group)
        try:
            with cpu_seconds(RENDER_S * len(alike), "it"):
                encoded: Any = tokenizer.apply_chat_template(
                    [forms.fitted(chat.messages) for chat in alike],
                    chat_template=template,
                    tools=added.tools or None,
                    tokenize=True,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                    **added.variables,
                )
        except (TemplateError, TypeError, TimeoutError) as error:
            place = alike[0].where if len(alike) == 1 else f"between {alike[0].where} and {alike[-1].where}"
            raise UserError(f"{place}: the chat template rejects a conversation: {error}") from error
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
            yield np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.bool_), None


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
