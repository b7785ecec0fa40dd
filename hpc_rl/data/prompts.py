"""Prompts of reinforcement learning: what the policy is asked, and what a reward function compares its answer with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.ppo import PromptDataConfig
from hpc_rl.data.chat import as_text, chat_template
from hpc_rl.data.rows import Row, to_prompt
from hpc_rl.data.sources import all_rows, chunks
from hpc_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 256  # rows per call of the tokenizer, which spreads them over its threads


@dataclass(frozen=True)
class Prompt:
    token_ids: NDArray[np.int32]
    """[P], up to where the assistant's turn begins."""
    answer: Any
    """Reference answer, as the column has it; None where data.answer_key is null."""
    row: Row
    """All columns, for reward functions that want more."""
    text: str
    """What the chat template wrote; whole, also where token_ids are truncated."""


@dataclass
class PromptCounts:
    rows: int = 0
    """Rows read, the dropped ones included."""
    tokens: int = 0
    """Tokens of the kept prompts."""
    truncated: int = 0
    """Prompts cut to data.max_prompt_length (and kept)."""
    dropped: int = 0
    """Prompts left out for being over data.max_prompt_length."""

    def __str__(self) -> str:
        text = f"{self.rows:,} prompts, {self.tokens:,} tokens"
        lost = {"truncated": self.truncated, "too long, dropped": self.dropped}
        return "; ".join([text, *(f"{count:,} {what}" for what, count in lost.items() if count)])


def load_prompts(
    files: Sequence[str], data: PromptDataConfig, tokenizer: PreTrainedTokenizerBase, split: str
) -> tuple[list[Prompt], PromptCounts]:
    """All prompts of some files, in their order, at most data.max_prompt_length tokens each.

    Args:
        files: parquet or jsonl files, or names of `datasets` data sets.
        split: "train" or "test"; which part of a `datasets` data set to take.

    Raises:
        UserError: bad files or rows (names file and row), a tokenizer without chat template, or no prompt left.
    """
    template = chat_template(tokenizer, data)
    prompts: list[Prompt] = []
    counts = PromptCounts()
    shortest = 0
    for chunk in chunks(all_rows(files, split), _BATCH):
        asked = [to_prompt(row, data, where) for row, where in chunk]
        texts = [
            as_text(tokenizer, template, messages, where, generation_prompt=True)
            for (messages, _), (_, where) in zip(asked, chunk, strict=True)
        ]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for (row, where), (_, answer), text, ids in zip(chunk, asked, texts, encoded, strict=True):
            if not ids:
                raise UserError(f"{where}: the chat template writes nothing for this prompt")
            shortest = min(shortest or len(ids), len(ids))
            fitted = _fitted(np.asarray(ids, dtype=np.int32), data, counts)
            if fitted is not None:
                prompts.append(Prompt(fitted, answer, row, text))
    if not prompts:
        raise UserError(
            f"{', '.join(files)}: all {counts.rows:,} prompts are over data.max_prompt_length {data.max_prompt_length} "
            f"(the shortest has {shortest:,} tokens): raise it, or set data.overlong_prompts=truncate"
        )
    return prompts, counts


def _fitted(ids: NDArray[np.int32], data: PromptDataConfig, counts: PromptCounts) -> NDArray[np.int32] | None:
    """The tokens within data.max_prompt_length, or None; counted either way."""
    counts.rows += 1
    too_long = len(ids) > data.max_prompt_length
    if too_long and data.overlong_prompts == "drop":
        counts.dropped += 1
        return None
    ids = ids[-data.max_prompt_length :].copy()
    counts.truncated += too_long
    counts.tokens += len(ids)
    return ids
