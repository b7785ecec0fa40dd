"""Validation: responses to the validation prompts, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.loop.batches import score_or_none
from hpc_rl.rl.loop.metrics import conversation_metrics
from hpc_rl.rl.loop.scoring import Scoring, response_texts
from hpc_rl.rl.rollout.engine import Sampling
from hpc_rl.rl.rollout.respondent import Respondent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Validation:
    """The result of a validation."""

    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    """One response to each of the first prompts: prompt, response, answer, score."""


def validate(
    prompts: Sequence[Prompt],
    queue: Respondent,
    scoring: Scoring,
    tokenizer: PreTrainedTokenizerBase,
    config: PpoConfig,
    stops: Callable[[], bool],
) -> Validation | None:
    """Generate rollout.val.n responses to each prompt and score them. They are the same at each validation of the same
    weights.

    Args:
        stops: called from time to time if all engines may leave; returns whether the run stops, without a result.
    """
    each = config.rollout.val
    sampling = Sampling(config.data.max_response_length, each.temperature, each.top_p)
    seeds = np.random.default_rng([config.trainer.seed]).integers(2**62, size=len(prompts) * each.n).tolist()
    asked = [
        queue.ask(prompt, [(seed, sampling) for seed in seeds[index * each.n : (index + 1) * each.n]])
        for index, prompt in enumerate(prompts)
    ]
    may_take_long = config.rollout.engines == "lent"
    is_complete = queue.wait(asked, stops) if may_take_long else queue.wait(asked)
    queue.pause()
    if not is_complete:
        return None
    completions = [completion for one in asked for completion in one.completions()]
    prompts = [prompt for prompt in prompts for _ in range(each.n)]
    scores = scoring.start(prompts, completions).wait()
    found = scores.values[~np.isnan(scores.values)]
    lengths = np.array([completion.sampled for completion in completions])
    metrics = {
        "val/response_length": float(lengths.mean()),
        "val/unfinished": float(np.mean([not completion.finished for completion in completions])),
        "val/reward_errors": float(len(scores.errors)),
    }
    if len(found) and config.scores:
        metrics["val/score"] = float(found.mean())
    metrics |= {f"val/reward/{name}": mean for name, mean in scores.component_means().items()}
    metrics |= {f"val/{name}": value for name, value in conversation_metrics(completions).items()}
    shown = slice(0, config.trainer.log_val_generations * each.n, each.n)
    texts = response_texts(tokenizer, completions[shown])
    samples = [
        {"prompt": prompt.text, "response": text, "answer": prompt.answer, "score": score_or_none(score)}
        for prompt, text, score in zip(prompts[shown], texts, scores.values[shown], strict=True)
    ]
    return Validation(metrics, samples)
