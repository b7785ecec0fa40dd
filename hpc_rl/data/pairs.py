"""Preferences as token sequences: pairs of samples, or single samples with labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.preferences import PreferenceDataConfig
from hpc_rl.data.formats import Row
from hpc_rl.data.preference_rows import LabelledRow, PairRow, to_preference
from hpc_rl.data.rows import Message
from hpc_rl.data.sft_dataset import ROWS_PER_CALL, Counts, Encoder, Sample, encoder
from hpc_rl.data.sources import all_rows, chunks
from hpc_rl.host.heartbeat import heart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Preference:
    """What a micro-batch cannot divide: the two samples of a pair, or the sample of a labelled response."""

    samples: tuple[Sample, ...]
    """Chosen and rejected; or one sample, which may be followed by a mismatched one (see `mismatched`)."""
    values: tuple[float, ...]
    """The pair's margin, or the labels."""
    ref_logprobs: tuple[float, ...] = ()
    """The reference's log-probability of each sample's response, if it has been computed."""


def tokenize_preference_files(
    files: Sequence[str],
    data: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str,
    rank: int = 0,
    world: int = 1,
) -> tuple[list[Preference | None], Counts]:
    """Tokenize this rank's share of all rows, `rows[rank::world]`; see `tokenize_preferences`."""
    return tokenize_preferences(islice(all_rows(files, split), rank, None, world), data, tokenizer)


def tokenize_preferences(
    rows: Iterable[tuple[Row, str]], data: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Preference | None], Counts]:
    """Tokenize rows, each given with its place for errors. The targets are the tokens of the responses.

    Returns:
        one preference per row, None for a dropped row; and the counts of both.

    Raises:
        UserError: a row is not valid, or the tokenizer has no chat template or no fast version.
    """
    encode = encoder(tokenizer, data)
    found: list[Preference | None] = []
    counts = Counts()
    for chunk in chunks(rows, ROWS_PER_CALL):
        heart.beat()
        read = [(to_preference(row, data, where), where) for row, where in chunk]
        encoded = iter(_encoded(encode, read))
        for row, _ in read:
            samples = tuple(next(encoded) for _ in _chats(row))
            values = (row.margin,) if isinstance(row, PairRow) else row.labels
            found.append(_kept(Preference(samples, values), row, data, counts))
    return found, counts


def mismatched(preferences: Sequence[Preference], max_length: int) -> list[Preference]:
    """Add to each labelled response a second sample: its prompt with the response of the next row of another prompt.

    KTO estimates the divergence from the reference on such samples (Ethayarajh et al. 2024,
    https://arxiv.org/abs/2402.01306). The next row is taken from the whole data set, so that a sample does
    not depend on its batch.
    """
    samples = [one.samples[0] for one in preferences]
    others = _next_others([_prompt(sample).tobytes() for sample in samples])
    return [
        replace(one, samples=(sample, _exchanged(sample, samples[other], max_length)))
        for one, sample, other in zip(preferences, samples, others, strict=True)
    ]


def _next_others(values: Sequence[bytes]) -> list[int]:
    """Return for each value the index of the next different one; after the last value follows the first.

    If all are equal, it is the index of the next one.
    """
    count = len(values)
    found = [(index + 1) % count for index in range(count)]
    if len(set(values)) > 1:
        for index in reversed(range(2 * count)):  # the second time, what follows the last value is known
            own, following = index % count, (index + 1) % count
            found[own] = following if values[own] != values[following] else found[following]
    return found


def _prompt(sample: Sample) -> NDArray[np.int32]:
    """Return the tokens before the first target."""
    return sample.input_ids[: int(np.argmax(sample.loss_mask))]


def _exchanged(asked: Sample, answered: Sample, max_length: int) -> Sample:
    """Return the prompt of one sample with the response of another."""
    prompt, response = len(_prompt(asked)), len(_prompt(answered))
    ids = np.concatenate([asked.input_ids[:prompt], answered.input_ids[response:]])[:max_length]
    mask = np.concatenate([asked.loss_mask[:prompt], answered.loss_mask[response:]])[:max_length]
    return Sample(ids, mask)


def _chats(row: PairRow | LabelledRow) -> tuple[list[Message], ...]:
    return (row.chosen, row.rejected) if isinstance(row, PairRow) else (row.messages,)


def _encoded(encode: Encoder, rows: Sequence[tuple[PairRow | LabelledRow, str]]) -> Iterable[Sample]:
    """Tokenize the chats of all rows, with the loss only on what follows the prompt."""
    chats = [(messages, where) for row, where in rows for messages in _chats(row)]
    prompts = [
        (messages[: row.common if isinstance(row, PairRow) else -1], where)
        for row, where in rows
        for messages in _chats(row)
    ]
    # A prompt without a turn of the assistant has no targets, so it need not be tokenized.
    earlier = [index for index, (prompt, _) in enumerate(prompts) if any(one["role"] == "assistant" for one in prompt)]
    begin = dict(zip(earlier, encode([prompts[index] for index in earlier]) if earlier else (), strict=True))
    for index, (ids, mask) in enumerate(encode(chats)):
        if index in begin:
            mask[: _common_tokens(begin[index][0], ids)] = False
        mask[:1] = False
        end = int(mask.nonzero()[0].max(initial=-1)) + 1  # templates write a line break after the end-of-turn token
        yield Sample(ids[:end].copy(), mask[:end].copy())


def _common_tokens(prompt: NDArray[np.int32], ids: NDArray[np.int32]) -> int:
    """Return the number of tokens that two sequences begin with."""
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
