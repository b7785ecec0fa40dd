"""Distillation: the mean divergence of the model from a teacher, over the target tokens of a global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpc_rl.config.distill import DistillConfig
from hpc_rl.errors import AgreedError
from hpc_rl.finetune.base import Found
from hpc_rl.finetune.dataset import gather_samples
from hpc_rl.finetune.sft import Sft
from hpc_rl.finetune.teacher import Lesson, Teacher, pack_lessons, top_k_dtype, with_top_k
from hpc_rl.run_dir import RunDir
from hpc_rl.training.distributed import World
from hpc_rl.training.models.causal_lm import CausalLM
from hpc_rl.training.models.distill_head import SUMS, Teaching, Terms, distillation_sum, live, stored
from hpc_rl.training.models.packed_batch import PackedBatch
from hpc_rl.training.models.teacher import common_outputs
from hpc_rl.training.stopping import Stopping


@dataclass(frozen=True)
class LessonBatch:
    """A micro-batch of lessons."""

    packed: PackedBatch
    ids_NK: torch.Tensor
    """The teacher's most probable tokens at each target: int64. Empty if they were not stored."""
    logprobs_NK: torch.Tensor
    """Their log-probabilities, and that of all other tokens together, [N, K + 1]: float32."""

    def to(self, device: torch.device) -> LessonBatch:
        """Return a copy on the device."""
        return LessonBatch(self.packed.to(device), self.ids_NK.to(device), self.logprobs_NK.to(device))


class Distill(Sft):
    """Learn the teacher's distribution of each of the assistant's tokens of chats."""

    config: DistillConfig  # type: ignore[assignment]
    _teacher: Teacher | None = None
    """Held if it is evaluated in each step."""

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        own = config.algorithm
        self._tokens = 0
        self._terms = Terms(own.divergence, own.js_weight, own.temperature, own.sft_coeff)

    def gather(self, share: Sequence[Any], world: World) -> list[Any]:
        """See `Objective.gather`."""
        return [Lesson(sample) for sample in gather_samples(share, world)]

    def prepare(
        self, train: list[Lesson], val: list[Lesson], run: RunDir, world: World, stopping: Stopping
    ) -> tuple[list[Lesson], list[Lesson]]:
        """Load the teacher, or add its most probable tokens to the lessons."""
        self._tokens = world.together(lambda: common_outputs(self.config.teacher.path, self.config.model))
        if self.config.teacher.top_k is not None and self.config.teacher.top_k >= self._tokens:
            raise AgreedError(
                f"teacher.top_k {self.config.teacher.top_k} is not less than the {self._tokens:,} tokens that both "
                "models have: lower it, or remove it to compare all"
            )
        if not self.config.teacher.precompute_top_k:
            self._teacher = Teacher(self.config, self._tokens, world)
            return train, val
        lessons = with_top_k(self.config, self._tokens, [*train, *val], run, world, stopping)
        return lessons[: len(train)], lessons[len(train) :]

    def collate(self, items: Sequence[Any]) -> Any:
        """Build a micro-batch; the filler if a rank has no samples left."""
        rows = [lesson.top_k for lesson in items if lesson.top_k is not None]
        found = np.concatenate(rows or [np.empty(0, top_k_dtype(0))])
        ids_NK, logprobs_NK = found["ids"].astype(np.int64), np.ascontiguousarray(found["logprobs"])
        return LessonBatch(pack_lessons(items), torch.from_numpy(ids_NK), torch.from_numpy(logprobs_NK))

    def loss(self, model: CausalLM, batch: LessonBatch, scale: float) -> Found:
        """Return `scale` times the sum of the losses of a micro-batch's targets, in nats."""
        if self._teacher is None:
            return self._compared(model, batch.packed, stored(batch.ids_NK, batch.logprobs_NK), scale)
        outputs = self._teacher.outputs(batch.packed)  # also without targets: all ranks have to call this
        teaching = live(*outputs, self.config.algorithm.temperature, self.config.teacher.top_k)
        found = self._compared(model, batch.packed, teaching, scale)
        self._teacher.release()
        return found

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the means over all targets."""
        count, *totals = sums
        return {name: total / count for name, total in zip(SUMS, totals, strict=True)}

    def _compared(self, model: CausalLM, packed: PackedBatch, teaching: Teaching, scale: float) -> Found:
        def head(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            common_VH = weight_VH if len(weight_VH) == self._tokens else weight_VH[: self._tokens]
            return distillation_sum(hidden_NH, common_VH, packed.targets_N, teaching, self._terms, scale)

        total, sums = model(packed, head)
        return Found(total, torch.cat([sums.new_tensor([len(packed.targets_N)]), sums]))
