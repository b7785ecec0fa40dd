"""A run in progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpc_rl.algorithms.kl import AdaptiveKl
from hpc_rl.config.ppo import PpoConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.batches import Sampler
from hpc_rl.rl.plan import OldLogprobs
from hpc_rl.rl.rollout.rollout import Rollout
from hpc_rl.rl.scoring import Scoring
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.run_dir import RunDir
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.model import Flops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class State:
    """Everything that the loop works with. What it changes stands last."""

    config: PpoConfig
    run: RunDir
    tokenizer: PreTrainedTokenizerBase
    train: list[Prompt]
    val: list[Prompt]
    groups: list[WorkerGroup]
    """All groups that a step's responses are dealt to, each once."""
    actor: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    rollout: Rollout
    scoring: Scoring
    sampler: Sampler
    old_logprobs: OldLogprobs
    gpus: int
    """GPUs, or CPU slots, of all pools."""
    flops: Flops
    """Of training the policy."""
    peak: float | None
    """Floating-point operations per second of one of the policy's devices, if that is known."""
    total_steps: int
    tracker: Tracker

    kl: AdaptiveKl
    step: int
    total_tokens: int
    saved_at: float = field(default_factory=time.monotonic)
