"""The columns of a step that its workers compute: log-probabilities of policy, reference and teacher, and values.

If engines have GPUs of their own, the workers compute these columns for each mini-batch as soon as it is complete,
while the engines generate the others. The mini-batches are the same as without this, and so are the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.loop.assignment import mini_batches
from hpc_rl.rl.loop.experience import joined, new_experience
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.rl.workers.group import WorkerGroup


@dataclass(frozen=True)
class Computation:
    """How a column is computed."""

    group: WorkerGroup
    method: str
    """Of hpc_rl.rl.workers.worker.Worker."""
    is_early: bool = False
    """Whether it may be computed during generation."""
    stays: bool = False
    """Whether it may stay with the carrier, because the driver does not need it."""


class ComputedColumns:
    """Starts the computations of a step.

    Args:
        computations: by column.
        responses: of a step.
        mini_batch_size: see actor.mini_batch_size.
    """

    def __init__(self, computations: Mapping[str, Computation], responses: int, mini_batch_size: int | None) -> None:
        self._computations = computations
        self._early = {name: one for name, one in computations.items() if one.is_early}
        self._mini_batches = mini_batches(responses, mini_batch_size)
        self._begun: list[dict[str, Pending[torch.Tensor]]] = []
        """The early columns of the first mini-batches."""

    @property
    def awaits(self) -> int | None:
        """Number of the step's first responses that `begin` needs to start more; None if it starts nothing more."""
        left = self._mini_batches[len(self._begun) :] if self._early else []
        return left[0].stop if left else None

    def begin(self, prompts: Sequence[Prompt], groups: Sequence[int], completions: Sequence[Completion]) -> None:
        """Start to compute the early columns of the mini-batches that are complete.

        Args:
            prompts, groups, completions: the first responses of the step, or all; see draws.Batch.
        """
        if not self._early:
            return
        for part in self._mini_batches[len(self._begun) :]:
            if part.stop > len(completions):
                return
            tokens = [prompt.token_ids for prompt in prompts[part]]
            responses = new_experience(tokens, groups[part], completions[part])
            self._begun.append({name: one.group.column_of(one.method, responses) for name, one in self._early.items()})

    def take(self) -> dict[str, Pending[Any]]:
        """Start to compute the other columns of the step, whose responses the workers hold. Return all columns, by
        name; the next call of `begin` is for the next step."""
        found: dict[str, Pending[Any]] = {}
        for name, one in self._computations.items():
            if one.is_early:
                found[name] = Pending.of_all([parts[name] for parts in self._begun]).then(joined)
            else:
                found[name] = one.group.keep(one.method) if one.stays else one.group.column(one.method)
        self._begun = []
        return found
