"""Reward models: a score of a response, read at its last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hpc_rl.algorithms.preferences import bradley_terry
from hpc_rl.config.preferences import RmConfig
from hpc_rl.data.pairs import Preference, tokenize_preference_files
from hpc_rl.data.sft_dataset import Counts
from hpc_rl.finetune.base import Found, Objective
from hpc_rl.finetune.dataset import gather_preferences
from hpc_rl.finetune.pair_batch import PairBatch, pack_preferences
from hpc_rl.training.distributed import World
from hpc_rl.training.models.pretrained import Pretrained
from hpc_rl.training.models.scalar_model import ScalarModel, trained_scalar_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BINS = 10
"""Intervals of the confidence, of equal width, in the calibration error."""


class _Scoring(Objective):
    """An objective of a sequence classifier with one output."""

    config: RmConfig
    width: int
    """Samples of each preference."""

    def tokenize(
        self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, split: str, rank: int, world: int
    ) -> tuple[list[Preference | None], Counts]:
        """See `Objective.tokenize`."""
        return tokenize_preference_files(files, self.config.data, tokenizer, split=split, rank=rank, world=world)

    def gather(self, share: Sequence[Preference | None], world: World) -> list[Preference]:
        """See `Objective.gather`."""
        return gather_preferences(share, world, self.width)

    def model(self) -> Pretrained[ScalarModel]:
        """Return the classifier: a causal language model with a new head, or an earlier reward model."""
        return trained_scalar_model(self.config.model.path, "model.path", self.config.model)

    def collate(self, items: Sequence[Preference]) -> PairBatch:
        """Build a micro-batch."""
        return pack_preferences(items, self.width)

    def scores(self, model: ScalarModel, batch: PairBatch) -> torch.Tensor:
        """Return the score of each sample, [P, W]."""
        return batch.by_preference(model(batch.last_tokens()))


class BradleyTerry(_Scoring):
    """Score the chosen response of each pair above the rejected one."""

    width = 2

    def loss(self, model: ScalarModel, batch: PairBatch, scale: float) -> Found:
        """Return `scale` times the sum of the pairs' losses."""
        chosen_P, rejected_P = self.scores(model, batch).T
        loss_P = bradley_terry(chosen_P, rejected_P, batch.value_P)
        with torch.no_grad():
            right_P, confidence_P = (chosen_P > rejected_P).float(), torch.sigmoid((chosen_P - rejected_P).abs())
            # The more probable order has a probability of 0.5 to 1.
            bin_P = ((confidence_P - 0.5) * 2 * BINS).long().clamp(0, BINS - 1)  # also if it is NaN
            columns = torch.stack([torch.ones_like(right_P), right_P, confidence_P])
            bins = columns.new_zeros(3, BINS).index_add(1, bin_P, columns)
            sums = torch.cat([torch.stack([chosen_P.sum(), rejected_P.sum()]), bins.flatten()])
        return Found(scale * loss_P.sum(), sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return accuracy, scores, margin, and the expected calibration error (Guo et al. 2017,
        https://arxiv.org/abs/1706.04599) of the probability of the more probable order."""
        chosen, rejected, *bins = sums
        counts, right, confidence = (bins[start : start + BINS] for start in range(0, 3 * BINS, BINS))
        pairs = sum(counts)
        return {
            "accuracy": sum(right) / pairs,
            "margin": (chosen - rejected) / pairs,
            "reward_chosen": chosen / pairs,
            "reward_rejected": rejected / pairs,
            "calibration_error": sum(abs(r - c) for r, c in zip(right, confidence, strict=True)) / pairs,
        }


class Regression(_Scoring):
    """Score a response by its label: the mean squared error."""

    width = 1

    def loss(self, model: ScalarModel, batch: PairBatch, scale: float) -> Found:
        """Return `scale` times the sum of the squared errors."""
        score_P = self.scores(model, batch)[:, 0]
        error_P = score_P - batch.value_P
        with torch.no_grad():
            sums = torch.stack([torch.ones_like(error_P), error_P.abs(), score_P, batch.value_P]).sum(dim=1)
        return Found(scale * error_P.square().sum(), sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the mean absolute error, the mean score and the mean label."""
        count, *totals = sums
        names = ("absolute_error", "score_mean", "label_mean")
        return {name: total / count for name, total in zip(names, totals, strict=True)}
