"""Reward models: scores of a response, read at its last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hpc_rl.algorithms.preferences import bradley_terry
from hpc_rl.config.training.preferences import RmConfig
from hpc_rl.data.pairs import Preference, preference_tokenizer
from hpc_rl.data.sample_files import Samples, preferences
from hpc_rl.data.tokenized import Tokenize
from hpc_rl.finetune.base import Found, Objective
from hpc_rl.finetune.pair_batch import PairBatch, pack_preferences
from hpc_rl.training.models.pretrained import Pretrained
from hpc_rl.training.models.scalar_model import ScoreModel, check_outputs, trained_reward_model
from hpc_rl.training.parallel.distributed import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BINS = 10
"""Intervals of the confidence, of equal width, in the calibration error."""


class _Scoring(Objective):
    """An objective of a sequence classifier with one output, or one for each label."""

    config: RmConfig
    width: int
    """Samples of each preference."""

    @property
    def form(self) -> Samples[Preference]:
        """What a preference of the tokenized data consists of."""
        return preferences(self.width, self.config.outputs)

    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> Tokenize:
        """Return the function that tokenizes preferences."""
        return preference_tokenizer(self.untemplated_data, tokenizer)

    def model(self) -> Pretrained[ScoreModel]:
        """Return the classifier: a causal language model with a new head, or an earlier reward model."""
        return trained_reward_model(self.config.model, self.config.data.labels)

    def load(self, world: World) -> ScoreModel:
        """Load the classifier. Every rank calls this.

        Raises:
            AgreedError: an earlier reward model has another number of outputs.
        """
        path, outputs = self.config.model.path, self.config.outputs
        world.together(lambda: check_outputs("model.path", path, outputs))
        model: ScoreModel = super().load(world)
        return model

    def collate(self, items: Sequence[Preference]) -> PairBatch:
        """Build a micro-batch."""
        return pack_preferences(items, self.width, values=self.config.outputs)

    def scores(self, model: ScoreModel, batch: PairBatch) -> torch.Tensor:
        """Return the scores of each sample, [P, W, K]."""
        return batch.by_preference(model(batch.packed.last_tokens()))


class BradleyTerry(_Scoring):
    """Score the chosen response of each pair above the rejected one."""

    width = 2

    def loss(self, model: ScoreModel, batch: PairBatch, scale: float) -> Found:
        """Return `scale` times the sum of the pairs' losses."""
        chosen_P, rejected_P = self.scores(model, batch)[..., 0].T
        loss_P = bradley_terry(chosen_P, rejected_P, batch.values_PK[:, 0])
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
    """Score a response by its labels: the mean squared error."""

    width = 1

    def loss(self, model: ScoreModel, batch: PairBatch, scale: float) -> Found:
        """Return `scale` times the sum of the squared errors, each the mean over the labels of a response."""
        score_PK = self.scores(model, batch)[:, 0]
        error_PK = score_PK - batch.values_PK
        with torch.no_grad():
            sums_K = [column_PK.sum(dim=0) for column_PK in (error_PK.abs(), score_PK, batch.values_PK)]
            sums = torch.cat([error_PK.new_tensor([len(error_PK)]), *sums_K])
        return Found(scale * error_PK.square().mean(dim=1).sum(), sums)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the mean absolute error, the mean score and the mean label; with several labels, also of each one by
        its name."""
        count, *totals = sums
        labels = self.config.data.labels
        found = {}
        for number, name in enumerate(("absolute_error", "score_mean", "label_mean")):
            means = [total / count for total in totals[number * len(labels) : (number + 1) * len(labels)]]
            found[name] = sum(means) / len(means)
            if len(labels) > 1:
                found |= {f"{name}/{label}": mean for label, mean in zip(labels, means, strict=True)}
        return found
