"""The state of a run in progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hpc_rl.algorithms.kl import AdaptiveKl
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.carriers.base import Carrier
from hpc_rl.rl.loop.batches import BatchSource
from hpc_rl.rl.loop.computed import ComputedColumns
from hpc_rl.rl.loop.scoring import Scoring
from hpc_rl.rl.rollout.respondent import Respondent
from hpc_rl.rl.rollout.rollout import Rollout
from hpc_rl.rl.weights.adapter_check import AdapterCheck
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.training.loop import LoopState
from hpc_rl.training.models.causal_lm import Flops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OldLogprobs = Literal["skip", "rollout", "recompute"]
"""Where the policy's log-probabilities before a step's updates come from; see setup.old_logprobs."""


@dataclass(kw_only=True)
class PpoState(LoopState):
    """What a step works with, besides what every loop needs. The fields that a step changes come last."""

    config: PpoConfig
    tokenizer: PreTrainedTokenizerBase
    train: Sequence[Prompt]
    val: Sequence[Prompt]
    groups: list[WorkerGroup]
    """All groups that a step's responses are assigned to, each once."""
    actor: WorkerGroup
    critic: WorkerGroup | None
    computed: ComputedColumns
    """The columns that the groups compute."""
    carrier: Carrier
    """What brings a step's experience to the groups."""
    rollout: Rollout
    queue: Respondent
    """What responds to prompts: the rollout's queue, or conversations that use it."""
    scoring: Scoring
    batches: BatchSource
    old_logprobs: OldLogprobs
    adapter_check: AdapterCheck | None
    """With adapters: the checks that they reach the engines."""
    gpus: int
    """Number of GPUs, or CPU slots, in all pools."""
    flops: Flops
    """Cost of training the policy."""
    peak: float | None
    """Floating-point operations per second of one of the policy's devices; None if it is not known."""

    kl: AdaptiveKl
    steps_without_signal: int = 0
    """Number of latest steps, in a row, whose advantages were all 0."""
