"""Distillation: the mean divergence of the model from a teacher, over the target tokens of a global batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpc_rl.config.training.distill import DistillConfig
from hpc_rl.data.lazy import Sizes
from hpc_rl.errors import AgreedError
from hpc_rl.finetune.base import Found
from hpc_rl.finetune.sft import Sft
from hpc_rl.finetune.teacher import LESSONS, Lesson, Teacher, pack_lessons, top_k_dtype, with_top_k
from hpc_rl.finetune.teacher_ranks import RemoteTeacher, Teams, serve, split
from hpc_rl.run_dir import RunDir
from hpc_rl.training.models.attention.packed_batch import PackedBatch
from hpc_rl.training.models.causal_lm import CausalLM, PackedModel
from hpc_rl.training.models.distill_head import SUMS, Teaching, Terms, distillation_sum, stored
from hpc_rl.training.models.teacher import common_outputs
from hpc_rl.training.parallel.distributed import World
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
    form = LESSONS  # type: ignore[assignment]
    _teacher: Teacher | RemoteTeacher | None = None
    """Held if it is evaluated in each step."""
    _teams: Teams | None = None
    """Set if the teacher has ranks of its own."""

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        own = config.algorithm
        self._tokens = 0
        self._terms = Terms(own.divergence, own.js_weight, own.temperature, own.sft_coeff)

    def join(self, world: World) -> World | None:
        """See `Objective.join`. All ranks check the models: only rank 0, which trains, prints what is wrong."""
        self._tokens = self._common_outputs(world)
        if self.config.teacher.ranks_per_node is None:
            return world
        self._teams = split(world, self.config.teacher.ranks_per_node)
        return None if self._teams.teaches else self._teams.own

    def serve(self) -> int:
        """See `Objective.serve`."""
        assert self._teams is not None
        return serve(self.config, self._tokens, self._teams)

    def leave(self, exit_code: int) -> None:
        """See `Objective.leave`."""
        if isinstance(self._teacher, RemoteTeacher):
            self._teacher.leave(exit_code)

    def prepare(
        self,
        train: Sequence[Lesson],
        val: Sequence[Lesson],
        sizes: Sizes,
        run: RunDir,
        world: World,
        stopping: Stopping,
    ) -> tuple[Sequence[Lesson], Sequence[Lesson]]:
        """Load the teacher, or add its most probable tokens to the lessons."""
        if not self.config.teacher.precompute_top_k:
            if self._teams is None:
                self._teacher = Teacher(self.config, self._tokens, world)
            return train, val
        return with_top_k(self.config, self._tokens, train, val, sizes, run, world, stopping)

    def load(self, world: World) -> Any:
        """See `Objective.load`. A teacher on other ranks is loaded at the same time."""
        model = super().load(world)
        if self._teams is not None:
            self._teacher = RemoteTeacher(self.config, self._tokens, self._teams)
        return model

    def collate(self, items: Sequence[Any]) -> Any:
        """Build a micro-batch; the filler if a rank has no samples left."""
        rows = [lesson.top_k for lesson in items if lesson.top_k is not None]
        found = np.concatenate(rows or [np.empty(0, top_k_dtype(0))])
        ids_NK, logprobs_NK = found["ids"].astype(np.int64), np.ascontiguousarray(found["logprobs"])
        return LessonBatch(pack_lessons(items), torch.from_numpy(ids_NK), torch.from_numpy(logprobs_NK))

    def begin(self, model: PackedModel, batches: Iterable[LessonBatch], world: World) -> None:
        """See `Objective.begin`."""
        if isinstance(self._teacher, RemoteTeacher):
            self._teacher.begin(batch.packed for batch in batches)

    def loss(self, model: CausalLM, batch: LessonBatch, scale: float) -> Found:
        """Return `scale` times the sum of the losses of a micro-batch's targets, in nats."""
        own = model.sequence.own(batch.packed)
        if self._teacher is None:
            part = model.sequence.targets_of(batch.packed)
            return self._compared(model, own, stored(batch.ids_NK[part], batch.logprobs_NK[part]), scale)
        teaching = self._teacher.teaching(own)  # also without targets: all ranks have to call this
        found = self._compared(model, own, teaching, scale)
        self._teacher.release()
        return found

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the means over all targets."""
        count, *totals = sums
        return {name: total / count for name, total in zip(SUMS, totals, strict=True)}

    def _common_outputs(self, world: World) -> int:
        """Return the number of tokens that both models have.

        Raises:
            AgreedError: the two do not fit together, or there are fewer tokens than
                teacher.top_k needs.
        """
        tokens = world.together(lambda: common_outputs(self.config.teacher.path, self.config.model))
        if self.config.teacher.top_k is not None and self.config.teacher.top_k >= tokens:
            raise AgreedError(
                f"teacher.top_k {self.config.teacher.top_k} is not less than the {tokens:,} tokens that both models "
                "have: lower it, or remove it to compare all"
            )
        return tokens

    def _compared(self, model: CausalLM, own: PackedBatch, teaching: Teaching, scale: float) -> Found:
        """Compare the model with the teacher at the targets of a micro-batch.

        Args:
            own: this rank's slice of the row, for which `teaching` has the distributions.
        """

        def head(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            common_VH = weight_VH if len(weight_VH) == self._tokens else weight_VH[: self._tokens]
            return distillation_sum(hidden_NH, common_VH, own.targets_N, teaching, self._terms, scale, model.softcap)

        total, sums = model(own, head)
        sums = torch.cat([sums.new_tensor([len(own.targets_N)]), sums])
        return Found(model.sequence.total(total), model.sequence.total(sums))
