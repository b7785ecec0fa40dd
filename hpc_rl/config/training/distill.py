"""Options of distillation from a teacher: `submit distill`, and on-policy distillation in `submit ppo`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from hpc_rl.config.base import Path, Section
from hpc_rl.config.keys import MISSING
from hpc_rl.config.training.sft import SftConfig


class TeacherConfig(Section):
    path: Path
    """Folder or hub name of the teacher, a language model with the tokenizer of the model that is trained."""
    top_k: int | None = Field(None, ge=1)
    """Number of tokens to compare at each position: the teacher's most probable ones. All other tokens together are one
    more outcome. null: compare the whole vocabulary."""
    ranks_per_node: int | None = Field(None, ge=1)
    """Number of ranks of each node, the last ones, that only evaluate the teacher. All others train the model, and have
    only the output layer of the teacher, or nothing with top_k. null: all ranks do both."""
    precompute_top_k: bool = False
    """Compute the teacher's top_k tokens once, before training, and store them in the run directory. false: keep the
    teacher in memory and evaluate it in each step."""

    def problems(self) -> Iterator[str]:
        if self.precompute_top_k and self.top_k is None:
            yield (
                "precompute_top_k=true without top_k would store the whole vocabulary for each token: set top_k, for "
                "example top_k=64, or precompute_top_k=false"
            )
        if self.precompute_top_k and self.ranks_per_node is not None:
            yield (
                f"ranks_per_node={self.ranks_per_node} with precompute_top_k=true would leave these ranks without "
                "work, because the teacher is not used during training: remove one of the two"
            )


class OnPolicyTeacherConfig(Section):
    path: Path | None = None
    """Folder or hub name of a teacher, a language model with the policy's tokenizer (on-policy distillation). null: no
    teacher."""
    coeff: float = Field(1.0, gt=0)
    """Factor of log p(teacher) - log p(policy) at each token. With algorithm.advantage=opd the product is the token's
    advantage. With another estimator it is added to the advantage."""

    def problems(self) -> Iterator[str]:
        if self.path is None and self._is_changed("coeff"):
            yield f"coeff={self.coeff:g} has no effect without a teacher: set teacher.path, or remove it"


class DistillLossConfig(Section):
    divergence: Literal["forward", "reverse", "js"] = "forward"
    """Divergence between teacher and model at each token: forward (KL from the teacher to the model), reverse (KL from
    the model to the teacher), or js (generalised Jensen-Shannon)."""
    js_weight: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of divergence=js: close to 0 it acts like forward, close to 1 like
    reverse."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of both distributions in the divergence. The divergence is multiplied by the square of the
    temperature."""
    sft_coeff: float = Field(0.0, ge=0)
    """Weight of the cross-entropy of the data, per token, which is added to the loss."""

    def problems(self) -> Iterator[str]:
        if self.divergence != "js" and self._is_changed("js_weight"):
            yield f"js_weight has no effect with divergence={self.divergence}: use divergence=js, or remove it"


class DistillConfig(SftConfig):
    teacher: TeacherConfig
    algorithm: DistillLossConfig = DistillLossConfig()

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.data.stream_rows and self.teacher.precompute_top_k:
            yield (
                f"data.stream_rows={self.data.stream_rows} reads rows while the run trains, and "
                "teacher.precompute_top_k=true needs all of them before: set teacher.precompute_top_k=false"
            )
        own, ranks = self.teacher.ranks_per_node, self.trainer.n_gpus_per_node
        if own is not None and self.trainer.sequence_parallel > 1:
            yield (
                f"trainer.sequence_parallel={self.trainer.sequence_parallel} and teacher.ranks_per_node={own} are both "
                "set, but a teacher on ranks of its own evaluates whole rows: remove one of the two"
            )
        if own is not None and own >= ranks:
            yield (
                f"teacher.ranks_per_node={own} leaves no rank of a node to train the model: a node has {ranks} "
                "(trainer.n_gpus_per_node); lower teacher.ranks_per_node, or raise trainer.n_gpus_per_node"
            )
        if self.teacher.path == self.model.path != MISSING and not self.algorithm.sft_coeff:
            yield (
                f"teacher.path and model.path are both {self.model.path}: the model has nothing to learn from itself; "
                "name another teacher"
            )
