"""From the next prompts to a step's batch of responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.algorithms.advantages import informative_groups
from hpc_rl.config.ppo import PpoConfig
from hpc_rl.data.order import Position, batches
from hpc_rl.data.prompts import Prompt
from hpc_rl.errors import RunError
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.experience import new_experience
from hpc_rl.rl.rollout.base import Completion, Sampling
from hpc_rl.rl.rollout.rollout import Rollout
from hpc_rl.rl.scoring import Scored, Scoring, refuse_no_scores, response_texts
from hpc_rl.tracking.samples import chosen_responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Batch:
    """Responses, those to one prompt next to each other, and their scores."""

    prompts: list[Prompt]
    """Of each response."""
    groups: list[int]
    """Which prompt of the step each response answers."""
    completions: list[Completion]
    scored: Scored
    greedy_scored: Scored | None = None
    """Of the greedy responses to the same prompts, one per group, for ReMax."""

    def experience(self) -> TensorDict:
        return new_experience([prompt.token_ids for prompt in self.prompts], self.groups, self.completions)


class Sampler:
    """Draws a step's responses; a function of seed and step, so that a resumed run draws what it would have drawn.

    Args:
        start: where the data goes on.
    """

    def __init__(
        self, config: PpoConfig, train: Sequence[Prompt], rollout: Rollout, scoring: Scoring, start: Position
    ) -> None:
        self._config = config
        self._train = train
        self._rollout = rollout
        self._scoring = scoring
        self._batches = full_batches(config, len(train), start)
        self.position = start

    def draw(self, step: int) -> Batch:
        """The batch of a step: train_batch_size prompts, answered rollout.n times each.

        Raises:
            RunError: with algorithm.filter_groups, too few prompts are answered with differing success.
        """
        if not self._config.algorithm.filter_groups:
            return self._draw(step, 0)
        wanted = self._config.data.train_batch_size * self._config.rollout.n
        kept = _Kept()
        for attempt in range(self._config.algorithm.max_gen_batches):
            drawn = self._draw(step, attempt)
            refuse_no_scores(drawn.scored.wait(), step + 1)
            kept.add(drawn)
            if len(kept) >= wanted:
                return kept.batch(wanted)
        raise RunError(
            f"algorithm.filter_groups: of {self._config.algorithm.max_gen_batches} batches of "
            f"{self._config.data.train_batch_size} prompts (algorithm.max_gen_batches) only "
            f"{len(kept) // self._config.rollout.n} prompts had responses of differing score: the task is too easy or "
            "too hard for this model; raise max_gen_batches or rollout.n, or set filter_groups=false"
        )

    def _draw(self, step: int, attempt: int) -> Batch:
        config = self._config
        indices, self.position = next(self._batches)
        asked = [self._train[index] for index in indices]
        prompts = [prompt for prompt in asked for _ in range(config.rollout.n)]
        seeds = np.random.default_rng([config.trainer.seed, step, attempt]).integers(2**62, size=len(prompts)).tolist()
        completions = self._rollout.generate([p.token_ids for p in prompts], seeds, sampling(config)).wait()
        greedy_scored = None
        if config.algorithm.advantage == "remax":
            greedy = self._rollout.generate([p.token_ids for p in asked], [0] * len(asked), greedily(config)).wait()
            greedy_scored = self._scoring.start(asked, greedy)
        groups = np.repeat(np.arange(len(asked)), config.rollout.n).tolist()
        return Batch(prompts, groups, completions, self._scoring.start(prompts, completions), greedy_scored)


class _Kept:
    """Responses of several batches that dynamic sampling lets through."""

    def __init__(self) -> None:
        self._rows: list[tuple[Prompt, int, Completion, float]] = []
        self._groups = 0
        self._errors: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, batch: Batch) -> None:
        """Those of prompts whose responses do not all score alike."""
        scored = batch.scored.wait()
        scores = scored.values
        self._errors += scored.errors
        useful = informative_groups(torch.from_numpy(scores), torch.tensor(batch.groups)).tolist()
        groups = [group + self._groups for group in batch.groups]
        rows = zip(batch.prompts, groups, batch.completions, scores.tolist(), strict=True)
        self._rows += compress(rows, useful)
        self._groups += max(batch.groups) + 1

    def batch(self, responses: int) -> Batch:
        prompts, groups, completions, scores = map(list, zip(*self._rows[:responses], strict=True))
        return Batch(prompts, groups, completions, _Known(Scores(np.array(scores, np.float32), self._errors)))  # type: ignore[arg-type]


class _Known:
    """Scores that are here already."""

    def __init__(self, scores: Scores) -> None:
        self._scores = scores

    def wait(self) -> Scores:
        return self._scores


def training_samples(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the rows of samples.jsonl for a step: the best and the worst response to its first prompts."""
    scores = batch.scored.wait().values.tolist()
    chosen = chosen_responses(batch.groups, scores)
    texts = response_texts(tokenizer, [batch.completions[index] for index in chosen])
    return [
        {"prompt": prompt.text, "response": text, "answer": prompt.answer, "score": scores[index]}
        for index, text in zip(chosen, texts, strict=True)
        for prompt in [batch.prompts[index]]
    ]


def full_batches(config: PpoConfig, prompts: int, start: Position) -> Iterator[tuple[NDArray[np.int64], Position]]:
    """Batches of exactly train_batch_size prompts; what is left of an epoch waits for another order."""
    size = config.data.train_batch_size
    drawn = batches(prompts, size, seed=config.trainer.seed, shuffle=config.data.shuffle, start=start)
    return ((indices, position) for indices, position in drawn if len(indices) == size)


def sampling(config: PpoConfig) -> Sampling:
    """How responses to learn from are drawn."""
    rollout = config.rollout
    return Sampling(config.data.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k)


def greedily(config: PpoConfig) -> Sampling:
    """How responses to measure by are chosen."""
    return Sampling(config.data.max_response_length, temperature=0.0)
