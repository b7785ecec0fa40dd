"""Micro-batches of preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from hpc_rl.data.pairs import Preference
from hpc_rl.training.models.attention.packed_batch import PackedBatch, filler, pack_samples
from hpc_rl.training.models.causal_lm import CausalLM
from hpc_rl.training.models.lm_head import token_logprobs


@dataclass(frozen=True)
class PairBatch:
    """Preferences in one packed row, the samples of each one after the other.

    P preferences, W samples and K values of each.
    """

    packed: PackedBatch
    sample_N: torch.Tensor
    """The sample of each target, counted over the row: int64."""
    tokens_PW: torch.Tensor
    """Targets of each sample: float32."""
    ref_PW: torch.Tensor
    """The reference's log-probability of each sample's targets: float32. NaN if it has not been computed."""
    values_PK: torch.Tensor
    """The margin or the K labels of each preference: float32."""

    def to(self, device: torch.device) -> PairBatch:
        """Return a copy on the device."""
        moved = {field.name: getattr(self, field.name).to(device) for field in fields(self)}
        return PairBatch(**moved)

    def by_preference(self, values_S: torch.Tensor) -> torch.Tensor:
        """Arrange one value, or one vector, per sample as [P, W, ...]. The row of a rank without preferences has
        filler samples."""
        return values_S[: self.tokens_PW.numel()].view(*self.tokens_PW.shape, *values_S.shape[1:])


def pack_preferences(preferences: Sequence[Preference], width: int, first: int = 0, values: int = 1) -> PairBatch:
    """Build a micro-batch; without preferences one with filler samples.

    Args:
        width: number of samples of each preference that are packed.
        first: place of the first one among the preference's samples.
        values: margins or labels of each preference.
    """
    places = slice(first, first + width)
    samples = [sample for one in preferences for sample in one.samples[places]]
    masks = [sample.loss_mask for sample in samples]
    packed = pack_samples([sample.input_ids for sample in samples], masks) if samples else filler(width)
    counts = np.array([mask.sum() for mask in masks], np.int64)
    unknown = (np.nan,) * width
    ref = [one.ref_logprobs[places] if one.ref_logprobs else unknown for one in preferences]
    return PairBatch(
        packed=packed,
        sample_N=torch.from_numpy(np.repeat(np.arange(len(samples)), counts)),
        tokens_PW=torch.from_numpy(counts.astype(np.float32).reshape(-1, width)),
        ref_PW=torch.from_numpy(np.array(ref, np.float32).reshape(-1, width)),
        values_PK=torch.tensor([one.values for one in preferences], dtype=torch.float32).view(len(preferences), values),
    )


def response_logprobs(model: CausalLM, batch: PairBatch) -> torch.Tensor:
    """Return the log-probability of each sample's targets: [P, W], differentiable."""
    own = model.sequence.own(batch.packed)
    options = (1.0, False, model.softcap)  # temperature, and no entropy
    own_N, _ = model(own, lambda hidden_NH, weight_VH: token_logprobs(hidden_NH, weight_VH, own.targets_N, *options))
    logprobs_N = model.sequence.whole(own_N, batch.packed)
    sums_S = logprobs_N.new_zeros(len(batch.packed.lengths)).index_add(0, batch.sample_N, logprobs_N)
    return batch.by_preference(sums_S)
