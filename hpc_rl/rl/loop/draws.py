"""The prompts that are drawn from the data, the responses to them, and the batches that these become.

A group is the responses to one prompt. It is scored as soon as it is complete. Dynamic sampling
(algorithm.filter_groups) rejects groups whose responses have equal scores, and draws one further prompt for each. A
batch has the next groups, in the order of the data, that are not rejected: it does not depend on which responses are
complete first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.algorithms.advantages import informative_groups
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.mixture import Mixture
from hpc_rl.data.order import Position, epoch_order
from hpc_rl.data.prompts import Prompt
from hpc_rl.data.reading.shares import whole_batches
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.loop.experience import new_experience
from hpc_rl.rl.loop.scoring import NoBatchError, Scoring, refuse_no_scores
from hpc_rl.rl.rollout.engine import Completion, Sampling
from hpc_rl.rl.rollout.respondent import Respondent, Responses


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


@dataclass
class PromptGroup:
    """A prompt and the responses to it; for ReMax, the last one is greedy."""

    prompt: Prompt
    position: Position
    """In the data, after the prompt."""
    asked: Responses
    scored: Pending[Scores] | None = None
    """None until all responses are complete."""
    is_informative: bool | None = None
    """What dynamic sampling has found; None until there are scores."""


class Draws:
    """The prompts that were drawn and are in no batch yet.

    Args:
        order: see `prompt_order`.
    """

    def __init__(
        self,
        config: PpoConfig,
        train: Sequence[Prompt],
        queue: Respondent,
        scoring: Scoring,
        order: Iterator[tuple[int, Position]],
    ) -> None:
        self._config = config
        self._train = train
        self._queue = queue
        self._scoring = scoring
        self._order = order
        self._filters = config.algorithm.filter_groups
        self._size = config.data.train_batch_size
        self._step = 0
        self.groups: list[PromptGroup] = []
        """In the order of the data."""
        self._unscored: list[PromptGroup] = []
        """Those whose responses are not complete, or not being scored yet."""
        self._settled = 0
        """How many of the first groups are settled; see `settled`."""
        self.rejected = 0
        """Groups that were in the way to the latest batch, and rejected."""

    def lacks(self, batches: int = 1) -> int:
        """Return how many prompts so many batches need beyond those that were drawn and not rejected."""
        return max(0, batches * self._size - self._kept(self.groups))

    @property
    def is_generating(self) -> bool:
        """Whether a response is not complete."""
        return any(not group.asked.is_complete for group in self._unscored)

    def ask(self, step: int, batches: int = 1) -> None:
        """Draw the prompts that the next batches lack, and request responses to them.

        Args:
            step: of the first of these batches.
            batches: how many.

        Raises:
            NoBatchError: algorithm.max_gen_batches does not allow enough for a batch.
        """
        self._step = step
        most = self._config.algorithm.max_gen_batches * self._size if self._filters else self._size
        if self._filters:
            self._refuse_too_many(self.groups[:most], most)
        lacks = self.lacks(batches)
        kept = batches * self._size - lacks
        for index in range(min(lacks, batches * most - len(self.groups))):
            self._draw((kept + index) // self._size)

    def judge(self) -> None:
        """Start to score the groups that are complete. With dynamic sampling, judge those whose scores are there.

        Raises:
            NoScoresError: the reward failed for all responses, and these are enough for a batch.
        """
        at_once = self._scoring.at_once
        groups = self._unscored if at_once else self._of_next_batch()
        complete = [group for group in groups if group.asked.is_complete]
        if at_once or len(complete) == len(groups):
            self._score([group for group in complete if group.scored is None])
        if not self._filters:
            return
        unjudged = [group for group in self.groups if group.is_informative is None]
        ready = [(group, group.scored.wait()) for group in unjudged if group.scored and group.scored.is_ready()]
        for group, scores in ready:
            values = torch.from_numpy(scores.values)
            group.is_informative = bool(informative_groups(values, torch.zeros(len(values), dtype=torch.int64))[0])
        if ready and len(self.groups) - (len(unjudged) - len(ready)) >= self._size:
            judged = [group.scored.wait() for group in self.groups if group.scored and group.is_informative is not None]
            refuse_no_scores(joined_scores(judged), self._step + 1)

    def wait_for_score(self) -> None:
        """Wait for the scores of a group, if dynamic sampling needs them."""
        for group in self.groups:
            if self._filters and group.is_informative is None and group.scored is not None:
                group.scored.wait()
                return

    def take(self) -> tuple[Batch, Position] | None:
        """Remove the groups of the next batch. Without dynamic sampling, their scores may still be missing.

        Returns:
            the batch, and the position in the data after its last prompt; None if it is not complete. Its scores have
            the errors of all responses that were scored for it.
        """
        taken = self._of_next_batch()
        if not all(map(self._is_judged, taken)):
            return None
        kept = [group for group in taken if group.is_informative is not False]
        if len(kept) < self._size:
            return None
        del self.groups[: len(taken)]
        self._settled = 0
        rejected = [group.scored.wait() for group in taken if group.scored and group.is_informative is False]
        self.rejected = len(rejected)
        return self._batch(kept, rejected), taken[-1].position

    def settled(self, responses: int) -> list[PromptGroup]:
        """Return the first groups of the next batch, up to one that is not complete, or that dynamic sampling has not
        judged; none if these have fewer responses."""
        groups = self._of_next_batch()
        while self._settled < len(groups) and self._is_settled(groups[self._settled]):
            self._settled += 1
        if self._settled * self._config.rollout.n < responses:
            return []
        return [group for group in groups[: self._settled] if group.is_informative is not False]

    def _draw(self, ahead: int) -> None:
        """Draw a prompt, and request responses to it.

        Args:
            ahead: number of batches before the one that the prompt is for.
        """
        config, number = self._config, len(self.groups)
        index, position = next(self._order)
        prompt = self._train[index]
        seeds = seeds_at(config, position) if config.rollout.staleness else seeds_of(config, self._step, number)
        how = sampling(config)
        draws = [(seed, how) for seed in seeds]
        if config.algorithm.advantage == "remax":
            draws.append((0, greedy_sampling(config)))
        asked = self._queue.ask(prompt, draws, self._step + ahead)
        group = PromptGroup(prompt, position, asked)
        self.groups.append(group)
        self._unscored.append(group)

    def _of_next_batch(self) -> list[PromptGroup]:
        """Return the first groups up to the last one that the next batch needs, as far as they were drawn."""
        if not self._filters:
            return self.groups[: self._size]
        kept = 0
        for index, group in enumerate(self.groups):
            kept += group.is_informative is not False
            if kept == self._size:
                return self.groups[: index + 1]
        return list(self.groups)

    def _is_judged(self, group: PromptGroup) -> bool:
        return (group.is_informative if self._filters else group.scored) is not None

    def _is_settled(self, group: PromptGroup) -> bool:
        return group.asked.is_complete and not (self._filters and group.is_informative is None)

    def _kept(self, groups: Sequence[PromptGroup]) -> int:
        """Return how many groups are not rejected. Only dynamic sampling rejects any."""
        return sum(group.is_informative is not False for group in groups) if self._filters else len(groups)

    def _batch(self, kept: Sequence[PromptGroup], rejected: Sequence[Scores]) -> Batch:
        n = self._config.rollout.n
        scored = Pending.of_all([group.scored for group in kept if group.scored])
        greedy = None
        if self._config.algorithm.advantage == "remax":
            best = [group.asked.completions()[n] for group in kept]
            greedy = Greedy(best, scored.then(lambda parts: joined_scores([part_of(one, n, n + 1) for one in parts])))
        scores = scored.then(lambda parts: joined_scores([part_of(one, 0, n) for one in parts], rejected))
        return Batch(*responses_of(kept, n), scores, greedy)

    def _score(self, groups: Sequence[PromptGroup]) -> None:
        """Start to score the responses of these groups together."""
        found = [(group, group.asked.completions()) for group in groups]
        prompts = [group.prompt for group, completions in found for _ in completions]
        if not prompts:
            return
        scored = self._scoring.start(prompts, [one for _, completions in found for one in completions])
        end = 0
        for group, completions in found:
            start, end = end, end + len(completions)
            group.scored = scored.then(partial(part_of, start=start, end=end))
        self._unscored = [group for group in self._unscored if group.scored is None]

    def _refuse_too_many(self, first: Sequence[PromptGroup], most: int) -> None:
        """Raise NoBatchError if these groups, as many as a batch may draw, are judged and do not suffice for it."""
        found = self._kept(first)
        if len(first) < most or found >= self._size or not all(map(self._is_judged, first)):
            return
        raise NoBatchError(
            f"algorithm.filter_groups: of {most} prompts "
            f"({self._config.algorithm.max_gen_batches} batches of {self._size}, algorithm.max_gen_batches), only "
            f"{found} had responses with different scores. The task is too easy or too hard for this "
            "model: raise algorithm.max_gen_batches or rollout.n, or set algorithm.filter_groups=false"
        )


def responses_of(groups: Sequence[PromptGroup], n: int) -> tuple[list[Prompt], list[int], list[Completion]]:
    """Return the first n responses of each group: their prompts, the numbers of their groups, and the responses."""
    return (
        [group.prompt for group in groups for _ in range(n)],
        np.repeat(np.arange(len(groups)), n).tolist(),
        [completion for group in groups for completion in group.asked.completions()[:n]],
    )


def part_of(scores: Scores, start: int, end: int) -> Scores:
    """Return the scores of responses start ... end - 1."""
    errors = [(index - start, text) for index, text in scores.errors if start <= index < end]
    return Scores(scores.values[start:end], errors, scores.components[start:end])


def joined_scores(parts: Sequence[Scores], rejected: Sequence[Scores] = ()) -> Scores:
    """Return the scores of all parts as one, with the errors of further responses, whose indices mean nothing."""
    starts = np.cumsum([0, *(len(part.values) for part in parts)]).tolist()
    errors = [(start + index, text) for start, part in zip(starts, parts, strict=False) for index, text in part.errors]
    errors += [error for part in rejected for error in part.errors]
    components = [each for part in parts for each in (part.components or [{}] * len(part.values))]
    return Scores(np.concatenate([part.values for part in parts]), errors, components if any(components) else ())


def prompt_order(
    config: PpoConfig, prompts: int, start: Position, mixture: Mixture | None = None
) -> Iterator[tuple[int, Position]]:
    """Yield the indices of prompts without end, each with the position after it.

    Prompts at the end of an epoch that do not fill a batch are skipped; the next epoch has another order. A mixture has
    as many prompts in an epoch as fill whole batches, so that none is skipped.
    """
    used = whole_batches(prompts, config.data.train_batch_size)
    epoch, index = start.epoch, start.index
    while True:
        order = epoch_order(prompts, config.trainer.seed, epoch, config.data.shuffle, mixture)
        while index < used:
            index += 1
            yield int(order[index - 1]), Position(epoch, index) if index < prompts else Position(epoch + 1, 0)
        epoch, index = epoch + 1, 0


def seeds_of(config: PpoConfig, step: int, number: int) -> list[int]:
    """Return the seed of each response to a prompt, which is the prompt of this number in its step."""
    n, size = config.rollout.n, config.data.train_batch_size
    attempt, place = divmod(number, size)
    seeds: list[int] = _seeds(config.trainer.seed, step, attempt, size * n)[place * n : (place + 1) * n].tolist()
    return seeds


@lru_cache(maxsize=1)
def _seeds(*key: int) -> NDArray[np.int64]:
    """Return random numbers; the last argument is their number."""
    return np.random.default_rng([*key[:-1]]).integers(2**62, size=key[-1])


def seeds_at(config: PpoConfig, position: Position) -> list[int]:
    """Return the seed of each response to the prompt before this position in the data.

    If steps are generated ahead of time, a prompt may move to an earlier step when another one is rejected, and keeps
    its seeds.
    """
    drawn = np.random.default_rng([config.trainer.seed, position.epoch, position.index])
    seeds: list[int] = drawn.integers(2**62, size=config.rollout.n).tolist()
    return seeds


def sampling(config: PpoConfig) -> Sampling:
    """Return how training responses are sampled."""
    rollout, length = config.rollout, config.data.max_response_length
    return Sampling(length, rollout.temperature, rollout.top_p, rollout.top_k, config.truncates_logprobs)


def greedy_sampling(config: PpoConfig) -> Sampling:
    """Return how the baselines of ReMax are decoded."""
    return Sampling(config.data.max_response_length, temperature=0.0)
