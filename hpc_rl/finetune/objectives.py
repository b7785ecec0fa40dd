"""The objectives of fine-tuning, chosen by the type of the configuration.

To add an objective, write a module next to sft.py with the two functions of `Objective`, and add it to `OBJECTIVES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hpc_rl.config.sft import SftConfig
from hpc_rl.data.sft_dataset import Sample
from hpc_rl.finetune import sft
from hpc_rl.training.models.causal_lm import CausalLM
from hpc_rl.training.models.packed_batch import PackedBatch


class Objective(Protocol):
    """What a module of an objective provides."""

    def collate(self, samples: Sequence[Sample]) -> PackedBatch:
        """Build a micro-batch; without samples, one that has no loss and no gradient."""
        ...

    def loss(self, model: CausalLM, batch: PackedBatch, scale: float) -> torch.Tensor:
        """Return `scale` times the sum of a micro-batch's losses, a scalar.

        The trainer divides by the target tokens of the whole global batch, so that its mean does not depend on how it
        was split into micro-batches and ranks.
        """
        ...


OBJECTIVES: dict[type[SftConfig], Objective] = {SftConfig: sft}
"""Configuration -> module."""
