"""Labelled responses with a mismatched sample each, on which KTO estimates the divergence from the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hpc_rl.data.lazy import LazyRows
from hpc_rl.data.pairs import Preference
from hpc_rl.data.sft_dataset import Sample


class Mismatched(LazyRows[Preference]):
    """Labelled responses, each with a second sample: its prompt with the response of the next row of another prompt.

    See Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306. The next row is taken from the whole data set, so that
    a sample does not depend on its batch. After the last row follows the first one.
    """

    def __init__(self, preferences: Sequence[Preference], max_length: int) -> None:
        self._preferences, self._max_length = preferences, max_length
        digests = np.empty((len(preferences), 2), np.int64)
        for index, preference in enumerate(preferences):  # 16 bytes stand for a prompt: all might not fit into memory
            digest = hashlib.blake2b(_prompt(preference.samples[0]).tobytes(), digest_size=16).digest()
            digests[index] = np.frombuffer(digest, np.int64)
        self._others = next_others(digests)

    def __len__(self) -> int:
        return len(self._preferences)

    def row(self, index: int) -> Preference:
        one = self._preferences[index]
        asked, answered = one.samples[0], self._preferences[int(self._others[index])].samples[0]
        return replace(one, samples=(asked, _exchanged(asked, answered, self._max_length)))


def next_others(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each row of an array the index of the next different row; after the last row follows the first.

    If all are equal, it is the index of the next one.

    Args:
        values: [rows, columns].
    """
    count = len(values)
    following = (np.arange(count, dtype=np.int64) + 1) % max(count, 1)
    differs = (values != values[following]).any(axis=1)
    ends = np.flatnonzero(differs)  # the last rows of runs of equal ones
    if not len(ends):
        return following
    own_end = np.searchsorted(ends, np.arange(count))  # after the last end, the run continues with the first row
    return following[ends[own_end % len(ends)]]


def _prompt(sample: Sample) -> NDArray[np.int32]:
    """Return the tokens before the first target."""
    return sample.input_ids[: int(np.argmax(sample.loss_mask))]


def _exchanged(asked: Sample, answered: Sample, max_length: int) -> Sample:
    prompt, response = len(_prompt(asked)), len(_prompt(answered))
    ids = np.concatenate([asked.input_ids[:prompt], answered.input_ids[response:]])[:max_length]
    mask = np.concatenate([asked.loss_mask[:prompt], answered.loss_mask[response:]])[:max_length]
    return Sample(ids, mask)
