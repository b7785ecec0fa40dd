"""Preferences as token sequences: pairs of samples, or single samples with labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.training.preferences import PreferenceDataConfig
from hpc_rl.data.reading.formats import Row
from hpc_rl.data.reading.preference_rows import LabelledRow, PairRow, to_preference
from hpc_rl.data.reading.sources import BLOCK_ROWS, chunks
from hpc_rl.data.sft_dataset import Counts, Encoder, Sample, encoder
from hpc_rl.data.templates.messages import Chat, Extras, Message, extras, without_effect
from hpc_rl.liveness.heartbeat import heart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Preference:
    """What a micro-batch cannot divide: the two samples of a pair, or the sample of a labelled response."""

    samples: tuple[Sample, ...]
    """Chosen and rejected; or one sample, which may be followed by a mismatched one (see `Mismatched`)."""
    values: tuple[float, ...]
    """The pair's margin, or the labels."""
    ref_logprobs: tuple[float, ...] = ()
    """The reference's log-probability of each sample's response, if it has been computed."""


def preference_tokenizer(
    data: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Iterable[tuple[Row, str]]], tuple[list[Preference | None], Counts]]:
    """Return the function that tokenizes rows, each given with its place for errors. Targets are the responses' tokens.

    It returns one preference per row, None for a dropped row, and the counts of both. It raises UserError if a row is
    not valid.

    Raises:
        UserError: the tokenizer has no chat template or no fast version.
    """
    encode = encoder(tokenizer, data)

    def tokenize(rows: Iterable[tuple[Row, str]]) -> tuple[list[Preference | None], Counts]:
        found: list[Preference | None] = []
        counts = Counts()
        for chunk in chunks(rows, BLOCK_ROWS):
            heart.beat()
            read = [(to_preference(row, data, where), where, extras(row, where)) for row, where in chunk]
            counts.add_unused({}, (name for row, _ in chunk for name in without_effect(row, data.columns)))
            encoded = iter(_encoded(encode, read, counts))
            for row, _, _ in read:
                samples = tuple(next(encoded) for _ in _chats(row))
                values = (row.margin,) if isinstance(row, PairRow) else row.labels
                found.append(_kept(Preference(samples, values), row, data, counts))
        return found, counts

    return tokenize


def _chats(row: PairRow | LabelledRow) -> tuple[list[Message], ...]:
    return (row.chosen, row.rejected) if isinstance(row, PairRow) else (row.messages,)


def _encoded(
    encode: Encoder, rows: Sequence[tuple[PairRow | LabelledRow, str, Extras]], counts: Counts
) -> Iterable[Sample]:
    """Tokenize the chats of all rows, with the loss only on what follows the prompt. Count what is not used."""
    chats = [Chat(messages, where, added) for row, where, added in rows for messages in _chats(row)]
    prompts = [
        Chat(messages[: row.common if isinstance(row, PairRow) else -1], where, added)
        for row, where, added in rows
        for messages in _chats(row)
    ]
    # A prompt without a turn of the assistant has no targets, so it need not be tokenized.
    earlier = [
        index for index, prompt in enumerate(prompts) if any(one["role"] == "assistant" for one in prompt.messages)
    ]
    begin = dict(zip(earlier, encode([prompts[index] for index in earlier]) if earlier else (), strict=True))
    for index, (ids, mask, unused) in enumerate(encode(chats)):
        counts.add_unused(unused)
        if index in begin:
            mask[: _common_tokens(begin[index].ids, ids)] = False
        mask[:1] = False
        end = int(mask.nonzero()[0].max(initial=-1)) + 1  # templates write a line break after the end-of-turn token
        yield Sample(ids[:end].copy(), mask[:end].copy())


def _common_tokens(prompt: NDArray[np.int32], ids: NDArray[np.int32]) -> int:
    length = min(len(prompt), len(ids))
    different = np.flatnonzero(prompt[:length] != ids[:length])
    return int(different[0]) if len(different) else length


def _kept(
    preference: Preference, row: PairRow | LabelledRow, data: PreferenceDataConfig, counts: Counts
) -> Preference | None:
    """Return the preference, or None if it is dropped; add it to the counts in both cases."""
    counts.rows += 1
    lengths = [len(sample.input_ids) for sample in preference.samples]
    if isinstance(row, PairRow) and row.is_equal:
        counts.equal += 1
    elif min(lengths) == 0:
        counts.no_target += 1
    elif max(lengths) > data.max_length:
        counts.dropped += 1
    else:
        counts.tokens += sum(lengths)
        counts.target_tokens += sum(int(sample.loss_mask.sum()) for sample in preference.samples)
        return preference
    return None
