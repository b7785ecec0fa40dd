"""Validation: one greedy response to each validation prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_rl.config.ppo import PpoConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.batches import greedy_sampling
from hpc_rl.rl.rollout.rollout import Rollout
from hpc_rl.rl.scoring import Scoring, response_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Validation:
    """The result of a validation."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    """The first responses: prompt, response, answer, score."""


def validate(
    prompts: Sequence[Prompt],
    rollout: Rollout,
    scoring: Scoring,
    tokenizer: PreTrainedTokenizerBase,
    config: PpoConfig,
) -> Validation:
    """Generate one greedy response to each prompt and score it."""
    completions = rollout.generate([p.token_ids for p in prompts], [0] * len(prompts), greedy_sampling(config)).wait()
    scores = scoring.start(prompts, completions).wait()
    lengths = np.array([len(completion.token_ids) for completion in completions])
    metrics = {
        "val/score": float(scores.values.mean()),
        "val/response_length": float(lengths.mean()),
        "val/unfinished": float(np.mean([not completion.finished for completion in completions])),
        "val/reward_errors": float(len(scores.errors)),
    }
    metrics |= {f"val/reward/{name}": mean for name, mean in scores.component_means().items()}
    shown = config.trainer.log_val_generations
    texts = response_texts(tokenizer, completions[:shown])
    samples = [
        {"prompt": prompt.text, "response": text, "answer": prompt.answer, "score": float(score)}
        for prompt, text, score in zip(prompts, texts, scores.values, strict=False)
    ]
    return Validation(metrics, samples)
