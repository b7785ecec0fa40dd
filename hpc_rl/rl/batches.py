"""From the next prompts to a step's batch of responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

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
from hpc_rl.rl.calls import Pending
from hpc_rl.rl.experience import new_experience
from hpc_rl.rl.rollout.engine import Completion, Sampling
from hpc_rl.rl.rollout.rollout import Rollout
from hpc_rl.rl.scoring import Scoring, refuse_no_scores, response_texts
from hpc_rl.tracking.samples import chosen_responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Greedy:
    """The greedy responses to the prompts of a step, one per group."""

    completions: list[Completion]
    scored: Pending[Scores]


@dataclass(frozen=True)
class Batch:
    """A step's responses and their scores. Responses to the same prompt are adjacent."""

    prompts: list[Prompt]
    """The prompt of each response."""
    groups: list[int]
    """Which prompt of the step each response answers."""
    completions: list[Completion]
    scored: Pending[Scores]
    greedy: Greedy | None = None
    """For ReMax."""

    def experience(self) -> TensorDict:
        """Return the responses as tensors."""
        return new_experience([prompt.token_ids for prompt in self.prompts], self.groups, self.completions)


class BatchSource:
    """Generates the batch of each step. Batches depend only on the seed and the step, so that a resumed run gets the
    same batches as an uninterrupted one.

    Args:
        start: position in the data at which to start.
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

    def draw(self, step: int, stops: Callable[[], bool]) -> Batch | None:
        """Generate the batch of a step: train_batch_size prompts with rollout.n responses each.

        Args:
            stops: called between two batches of dynamic sampling; returns whether to stop.

        Returns:
            the batch; None if the run stops.

        Raises:
            RunError: algorithm.filter_groups is set, and too few prompts have responses with different scores.
        """
        if not self._config.algorithm.filter_groups:
            return self._draw(step, 0)
        needed = self._config.data.train_batch_size * self._config.rollout.n
        kept = _Kept()
        for attempt in range(self._config.algorithm.max_gen_batches):
            if attempt and stops():
                return None
            drawn = self._draw(step, attempt)
            refuse_no_scores(drawn.scored.wait(), step + 1)
            kept.add(drawn)
            if len(kept) >= needed:
                return kept.batch(needed)
        raise RunError(
            f"algorithm.filter_groups: in {self._config.algorithm.max_gen_batches} batches of "
            f"{self._config.data.train_batch_size} prompts (algorithm.max_gen_batches), only "
            f"{len(kept) // self._config.rollout.n} prompts had responses with different scores. The task is too easy "
            "or too hard for this model: raise algorithm.max_gen_batches or rollout.n, or set "
            "algorithm.filter_groups=false"
        )

    def _draw(self, step: int, attempt: int) -> Batch:
        config = self._config
        indices, self.position = next(self._batches)
        asked = [self._train[index] for index in indices]
        prompts = [prompt for prompt in asked for _ in range(config.rollout.n)]
        seeds = np.random.default_rng([config.trainer.seed, step, attempt]).integers(2**62, size=len(prompts)).tolist()
        completions = self._rollout.generate([p.token_ids for p in prompts], seeds, sampling(config)).wait()
        greedy = None
        if config.algorithm.advantage == "remax":
            best = self._rollout.generate(
                [p.token_ids for p in asked], [0] * len(asked), greedy_sampling(config)
            ).wait()
            greedy = Greedy(best, self._scoring.start(asked, best))
        groups = np.repeat(np.arange(len(asked)), config.rollout.n).tolist()
        return Batch(prompts, groups, completions, self._scoring.start(prompts, completions), greedy)


class _Response(NamedTuple):
    prompt: Prompt
    group: int
    completion: Completion
    score: float
    components: Mapping[str, float]


class _Kept:
    """The responses of several batches that dynamic sampling keeps."""

    def __init__(self) -> None:
        self._responses: list[_Response] = []
        self._groups = 0
        self._errors: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, batch: Batch) -> None:
        """Keep the responses to prompts whose responses have different scores."""
        scored = batch.scored.wait()
        self._errors += scored.errors
        useful = informative_groups(torch.from_numpy(scored.values), torch.tensor(batch.groups)).tolist()
        groups = [group + self._groups for group in batch.groups]
        components = scored.components or [{}] * len(groups)
        rows = zip(batch.prompts, groups, batch.completions, scored.values.tolist(), components, strict=True)
        self._responses += map(_Response._make, compress(rows, useful))
        self._groups += max(batch.groups) + 1

    def batch(self, responses: int) -> Batch:
        """Return a batch of the first `responses` that were kept, with the errors of all responses that were scored."""
        kept = self._responses[:responses]
        values = np.array([response.score for response in kept], np.float32)
        return Batch(
            [response.prompt for response in kept],
            [response.group for response in kept],
            [response.completion for response in kept],
            Pending.known(Scores(values, self._errors, [response.components for response in kept])),
        )


def training_samples(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the rows of samples.jsonl for a step: the best and the worst response to its first prompts."""
    scores = [score_or_none(score) for score in batch.scored.wait().values]
    chosen = chosen_responses(batch.groups, scores)
    texts = response_texts(tokenizer, [batch.completions[index] for index in chosen])
    return [
        {"prompt": prompt.text, "response": text, "answer": prompt.answer, "score": scores[index]}
        for index, text in zip(chosen, texts, strict=True)
        for prompt in [batch.prompts[index]]
    ]


def score_or_none(score: float) -> float | None:
    """Return the score as samples.jsonl has it: None if scoring failed."""
    return None if math.isnan(score) else float(score)


def full_batches(config: PpoConfig, prompts: int, start: Position) -> Iterator[tuple[NDArray[np.int64], Position]]:
    """Yield batches of exactly train_batch_size prompts. Prompts left over at the end of an epoch are skipped; the next
    epoch has another order."""
    size = config.data.train_batch_size
    drawn = batches(prompts, size, seed=config.trainer.seed, shuffle=config.data.shuffle, start=start)
    return ((indices, position) for indices, position in drawn if len(indices) == size)


def sampling(config: PpoConfig) -> Sampling:
    """Return how training responses are sampled."""
    rollout, length = config.rollout, config.data.max_response_length
    return Sampling(length, rollout.temperature, rollout.top_p, rollout.top_k, config.truncates_logprobs)


def greedy_sampling(config: PpoConfig) -> Sampling:
    """Return how the baselines of ReMax are decoded."""
    return Sampling(config.data.max_response_length, temperature=0.0)
