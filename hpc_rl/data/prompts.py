"""Prompts for reinforcement learning, with the reference answers that reward functions compare responses with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.rl.prompts import PromptConfig
from hpc_rl.data.reading.formats import Row
from hpc_rl.data.reading.rows import to_prompt, unlearned
from hpc_rl.data.reading.sources import BLOCK_ROWS, chunks
from hpc_rl.data.sft_dataset import unused_of
from hpc_rl.data.templates.chat import as_text, chat_template
from hpc_rl.data.templates.messages import Chat, Extras, extras, fields_without_effect, without_effect
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.liveness.heartbeat import heart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    token_ids: NDArray[np.int32]
    """[P], up to the start of the assistant's turn."""
    answer: Any
    """Reference answer, as it is in the column; None if data.answer_key is null."""
    row: Row
    """All columns, for reward functions that use others."""
    text: str
    """The rendered chat template; complete even if token_ids are truncated."""


@dataclass
class PromptCounts:
    rows: int = 0
    """Rows read, including the dropped ones."""
    tokens: int = 0
    """Tokens of the kept prompts."""
    truncated: int = 0
    """Prompts cut to data.max_prompt_length (and kept)."""
    dropped: int = 0
    """Prompts left out because they are longer than data.max_prompt_length."""
    unused: dict[str, int] = field(default_factory=dict)
    """Fields and columns without effect on the prompts, with their numbers."""
    shortest: int = field(default=0, compare=False)
    """Tokens of the shortest prompt, before any truncation."""

    def __add__(self, other: PromptCounts) -> PromptCounts:
        both = [length for length in (self.shortest, other.shortest) if length]
        return PromptCounts(
            rows=self.rows + other.rows,
            tokens=self.tokens + other.tokens,
            truncated=self.truncated + other.truncated,
            dropped=self.dropped + other.dropped,
            unused=dict(Counter(self.unused) + Counter(other.unused)),
            shortest=min(both, default=0),
        )

    def __str__(self) -> str:
        text = f"{counted(self.rows, 'prompt')}, {counted(self.tokens, 'token')}"
        lost = {"truncated": self.truncated, "too long, dropped": self.dropped}
        parts = [f"{count:,} {what}" for what, count in lost.items() if count]
        return "; ".join([text, *parts, *fields_without_effect(self.unused)])


def prompt_tokenizer(
    data: PromptConfig, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]] | None = None
) -> Callable[[Iterable[tuple[Row, str]]], tuple[list[Prompt], PromptCounts]]:
    """Return the function that tokenizes the prompts of rows, each given with its place for errors.

    It returns the kept prompts in their order, with at most data.max_prompt_length tokens each, and the counts of all
    rows. It raises UserError if a row is not valid.

    Args:
        tools: JSON schemas of the tools of a conversation, which the chat template describes to the model. None: the
            prompt is answered once.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    template = chat_template(tokenizer, data)

    def tokenize(rows: Iterable[tuple[Row, str]]) -> tuple[list[Prompt], PromptCounts]:
        prompts: list[Prompt] = []
        counts = PromptCounts()
        for chunk in chunks(rows, BLOCK_ROWS):
            heart.beat()
            asked = [to_prompt(row, data, where) for row, where in chunk]
            chats = [
                Chat(unlearned(messages), where, _extras(row, where, data, tools))
                for (messages, _), (row, where) in zip(asked, chunk, strict=True)
            ]
            texts = [
                as_text(tokenizer, template, messages, where, True, added.tools, added.variables)
                for messages, where, added in chats
            ]
            unused = Counter(counts.unused)
            for chat, text, (row, _) in zip(chats, texts, chunk, strict=True):
                unused.update(unused_of(tokenizer, template, chat, text))
                unused.update(without_effect(row, data.columns))
            counts.unused = dict(unused)
            encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
            for (row, where), (_, answer), text, ids in zip(chunk, asked, texts, encoded, strict=True):
                if not ids:
                    raise UserError(f"{where}: the chat template renders this prompt as empty text")
                fitted = _fitted(np.asarray(ids, dtype=np.int32), data, counts)
                if fitted is not None:
                    prompts.append(Prompt(fitted, answer, row, text))
        return prompts, counts

    return tokenize


def _extras(row: Row, where: str, data: PromptConfig, tools: Sequence[dict[str, Any]] | None) -> Extras:
    """Return tools and variables of the chat template for a row, whose own ones come first."""
    own = extras(row, where)
    if tools is not None and (own.tools or own.variables):
        raise UserError(
            f"{where}: the row has tools or variables of the chat template of its own, and an environment or an agent "
            "renders further turns of the conversation, which would be without them: remove the columns, and set "
            "environment.tools or data.chat_template_kwargs"
        )
    return Extras(own.tools or list(tools or ()), {**data.chat_template_kwargs, **own.variables})


def _fitted(ids: NDArray[np.int32], data: PromptConfig, counts: PromptCounts) -> NDArray[np.int32] | None:
    """Return the tokens within data.max_prompt_length, or None if dropped; add them to the counts in both cases."""
    counts.rows += 1
    counts.shortest = min(counts.shortest or len(ids), len(ids))
    too_long = len(ids) > data.max_prompt_length
    if too_long and data.overlong_prompts == "drop":
        counts.dropped += 1
        return None
    ids = ids[-data.max_prompt_length :].copy()
    counts.truncated += too_long
    counts.tokens += len(ids)
    return ids
