"""The supervised objective: the mean cross-entropy of the target tokens of a global batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hpc_rl.data.sft_dataset import Sample
from hpc_rl.training.models.causal_lm import CausalLM
from hpc_rl.training.models.lm_head import cross_entropy_sum
from hpc_rl.training.models.packed_batch import PackedBatch, filler, pack_samples


def collate(samples: Sequence[Sample]) -> PackedBatch:
    """Build a micro-batch; the filler if a rank has no samples left."""
    if not samples:
        return filler()
    return pack_samples([sample.input_ids for sample in samples], [sample.loss_mask for sample in samples])


def loss(model: CausalLM, batch: PackedBatch, scale: float) -> torch.Tensor:
    """Return `scale` times the summed cross-entropy of a micro-batch's targets, in nats.

    Divided by the target tokens of the whole global batch, not of the micro-batch, the sum over all micro-batches of
    all ranks is the batch's mean, independent of the split.
    """
    return model(batch, lambda hidden_NH, weight_VH: cross_entropy_sum(hidden_NH, weight_VH, batch.targets_N, scale))
