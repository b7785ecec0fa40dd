"""Several samples in one row of tokens, without padding.

Shape suffixes, here and in the rest of training: T tokens of a packed row, N positions whose next token is a target,
H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class PackedBatch:
    """One packed row: the samples of a micro-batch."""

    input_ids_T: torch.Tensor
    """Token ids, int64."""
    position_ids_T: torch.Tensor
    """Position of each token in its own sample, int64."""
    lengths: tuple[int, ...]
    """Tokens of each sample."""
    cu_seqlens: torch.Tensor
    """The start of each sample, and the end of the row: int32, [samples + 1]."""
    rows: NDArray[np.int64]
    """The numbers in `rows_N`, in ascending order and in host memory, for decisions that no GPU has to wait for."""
    rows_N: torch.Tensor
    """Positions in the row whose next token is a target, int64."""
    targets_N: torch.Tensor
    """The token to predict at each of these positions, int64."""
    tokens: int
    """Number of tokens that belong to samples, at the beginning; the others only fill up the row."""

    def to(self, device: torch.device) -> PackedBatch:
        """Return a copy on the device."""
        if device.type == "cpu":
            return self
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        return PackedBatch(lengths=self.lengths, rows=self.rows, tokens=self.tokens, **moved)

    def last_tokens(self) -> PackedBatch:
        """Return the same row, with each sample's last token as the only positions at which a model returns results."""
        last = np.cumsum(self.lengths, dtype=np.int64) - 1
        return replace(self, rows=last, rows_N=self.cu_seqlens[1:].long() - 1)


_TENSORS = ("input_ids_T", "position_ids_T", "cu_seqlens", "rows_N", "targets_N")


def pack_samples(tokens: Sequence[np.ndarray], target_masks: Sequence[np.ndarray]) -> PackedBatch:
    """Concatenate samples into one row.

    Args:
        tokens: token ids of each sample, [length].
        target_masks: bool, [length]: whether token i is a target, predicted from token i - 1; never true at 0.
    """
    lengths = [len(ids) for ids in tokens]
    ids_T = np.concatenate(tokens).astype(np.int64)
    targets = np.flatnonzero(np.concatenate(target_masks))
    return PackedBatch(
        input_ids_T=torch.from_numpy(ids_T),
        position_ids_T=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        lengths=tuple(lengths),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)),
        rows=targets - 1,
        rows_N=torch.from_numpy(targets - 1),
        targets_N=torch.from_numpy(ids_T[targets]),
        tokens=len(ids_T),
    )


def filler(samples: int = 1) -> PackedBatch:
    """Return the row of a rank without samples: no target, so no loss and no gradient.

    Args:
        samples: of one token each, as many as rows have without packing: ranks gather a model's weights for each.
    """
    return replace(pack_samples([np.zeros(1, np.int64)] * samples, [np.zeros(1, bool)] * samples), tokens=0)
