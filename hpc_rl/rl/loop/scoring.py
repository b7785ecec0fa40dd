"""Rewards for the loop: scoring starts as soon as there are responses, and the loop waits when it needs the scores."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from hpc_rl.config.rl.reward import OptionalRewardConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.environments.protocol import EpisodeResult
from hpc_rl.errors import RunError
from hpc_rl.rewards.scorer import Scorer, Scores, final_values
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.converse.transcripts import Conversed
from hpc_rl.rl.loop.experience import new_experience
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.rl.workers.group import WorkerGroup
from hpc_rl.training.perf import Span, Spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MOST_CALLS = 64
"""Groups that are scored at a time; the calls for their responses share the processes of the reward."""
NO_REWARD = "the environment returned no reward: add the method `reward`, or return rewards from `step`"


class Scoring(Protocol):
    """A source of rewards."""

    @property
    def at_once(self) -> bool:
        """Whether to score responses while others are generated, rather than all together."""

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str] | None = None
    ) -> Pending[Scores]:
        """Start to score completions[i] as a response to prompts[i].

        Args:
            texts: the completions as text, if they are decoded already.
        """

    def take_spans(self) -> dict[str, list[Span]]:
        """Return when it scored since the last call; see Spans.take."""

    def close(self) -> None:
        """End the processes and threads that score."""


class FunctionScoring:
    """Scores by a function or an endpoint, in threads, so that engines and workers compute meanwhile."""

    at_once = True

    def __init__(self, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> None:
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(max_workers=_MOST_CALLS)
        self._spans = Spans()

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str] | None = None
    ) -> Pending[Scores]:
        texts = response_texts(self._tokenizer, completions) if texts is None else texts
        return Pending.of_future(self._threads.submit(self._score, prompts, texts), "the reward")

    def take_spans(self) -> dict[str, list[Span]]:
        return self._spans.take()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._scorer.close()

    def _score(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> Scores:
        with self._spans("reward"):
            return self._scorer.score(prompts, texts)


class ModelScoring:
    """Scores by a reward model on the workers of a pool, which may have the engines in their processes."""

    at_once = False

    def __init__(self, group: WorkerGroup, config: OptionalRewardConfig) -> None:
        self._group = group
        self._config = config

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str] | None = None
    ) -> Pending[Scores]:
        experience = new_experience([p.token_ids for p in prompts], range(len(prompts)), completions)
        return self._group.reward_scores(experience).then(self._checked)

    def take_spans(self) -> dict[str, list[Span]]:
        return self._group.take_spans().wait()

    def close(self) -> None:
        """Close nothing: the workers end with their group."""

    def _checked(self, scores_B: torch.Tensor) -> Scores:
        """Treat scores that are not finite as failures."""
        bad = (~torch.isfinite(scores_B)).nonzero()[:, 0].tolist()
        if bad:
            print(f"warning: the reward model returned no finite score for {len(bad)} responses", file=sys.stderr)
        values_B = torch.where(torch.isfinite(scores_B), scores_B, math.nan)
        return Scores(final_values(values_B.numpy(), self._config), [(index, "not finite") for index in bad])


class Converses(Protocol):
    """What leads conversations: environments or agents."""

    def close(self) -> None:
        """End it, with its processes."""


class EnvironmentScoring:
    """The rewards that environments or agents gave at the end of conversations, plus those of another source, if there
    is one.

    Args:
        environment: is closed with this.
        other: without reward.clip and reward.on_error, which are for the sum. A function gets the model's last turn.
        missing: the reward of an environment that gives none. None: the conversation has failed.
    """

    def __init__(
        self,
        environment: Converses,
        other: Scoring | None,
        config: OptionalRewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        missing: float | None,
    ) -> None:
        self._environment = environment
        self._other = other
        self._config = config
        self._tokenizer = tokenizer
        self._missing = 0.0 if other is not None else missing

    @property
    def at_once(self) -> bool:
        return self._other is None or self._other.at_once

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str] | None = None
    ) -> Pending[Scores]:
        own = self._own([one for one in completions if isinstance(one, Conversed)])
        if self._other is None:
            return Pending.known(added_scores(own, None, self._config))
        last = last_turns(self._tokenizer, completions) if texts is None else texts
        return self._other.start(prompts, completions, last).then(partial(added_scores, own, config=self._config))

    def take_spans(self) -> dict[str, list[Span]]:
        return {} if self._other is None else self._other.take_spans()

    def close(self) -> None:
        if self._other is not None:
            self._other.close()
        self._environment.close()

    def _own(self, conversations: Sequence[Conversed]) -> Scores:
        """Return the environment's rewards, NaN where it failed."""
        outcomes = [one.outcome for one in conversations]
        missing = NO_REWARD if self._missing is None else None
        errors = [
            (index, error)
            for index, outcome in enumerate(outcomes)
            if (error := outcome.error or (missing if outcome.score is None else None)) is not None
        ]
        for _, error in errors[:1]:
            print(f"warning: {len(errors)} of {len(outcomes)} conversations have no reward: {error}", file=sys.stderr)
        none = self._missing or 0.0
        values = np.array([none if outcome.score is None else outcome.score for outcome in outcomes], np.float32)
        values[[index for index, _ in errors]] = math.nan
        return Scores(values, errors, [self._components(outcome) for outcome in outcomes])

    def _components(self, outcome: EpisodeResult) -> dict[str, float]:
        """Return what the environment reported. With another source, its reward is one of the components."""
        own = {} if outcome.score is None or self._other is None else {"environment": outcome.score}
        return {**own, **outcome.components}


def added_scores(own: Scores, other: Scores | None, config: OptionalRewardConfig) -> Scores:
    """Return the sum of an environment's rewards and of another source's scores, as `final_values`.

    Args:
        own: the environment's.
    """
    if other is None:
        return Scores(final_values(own.values, config), own.errors, own.components if any(own.components) else ())
    further = other.components or [{} for _ in own.components]
    components = [{**a, **b} for a, b in zip(further, own.components, strict=True)]
    errors = {**dict(other.errors), **dict(own.errors)}
    return Scores(final_values(own.values + other.values, config), sorted(errors.items()), components)


class NoScoring:
    """No rewards, for on-policy distillation: every score is 0, and no metric shows it."""

    at_once = True

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: Sequence[str] | None = None
    ) -> Pending[Scores]:
        return Pending.known(Scores(np.zeros(len(completions), np.float32), []))

    def take_spans(self) -> dict[str, list[Span]]:
        return {}

    def close(self) -> None:
        """Close nothing."""


class NoBatchError(RunError):
    """The responses of a step give no batch to train on. The step has changed nothing, so the run can still save."""


class NoScoresError(NoBatchError):
    """The reward failed for every response of a step."""


def refuse_no_scores(scores: Scores, number: int) -> None:
    """Raise NoScoresError if the reward failed for every response of a step: there is nothing to learn from.

    Args:
        scores: of responses that were scored together, so that the errors are those of these responses.
    """
    if len(scores.errors) == len(scores.values):
        raise NoScoresError(
            f"step {number}: none of {len(scores.values)} responses could be scored; the first error: "
            f"{scores.errors[0][1]}"
        )


def refuse_no_baselines(experience: TensorDict, greedy: Scores, number: int) -> None:
    """Raise NoScoresError if no response of a step has both a score and a baseline: the score of the greedy response to
    the same prompt (ReMax)."""
    if not experience["scored"].any():
        raise NoScoresError(
            f"step {number}: none of {len(experience)} responses has a score and a scored greedy response to the same "
            f"prompt; the first error of a greedy response: {greedy.errors[0][1]}"
        )


def last_turns(tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion]) -> list[str]:
    """Decode the model's last turn in each response, without special tokens."""
    added = tokenizer.added_tokens_decoder
    turns = [one.last_turn if isinstance(one, Conversed) else one.token_ids for one in completions]
    ids = [_without_end(added, turn) if one.finished else turn for one, turn in zip(completions, turns, strict=True)]
    texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return texts


def response_texts(tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion]) -> list[str]:
    """Decode responses, without special tokens. In a conversation they stay, because they separate its turns."""
    added = tokenizer.added_tokens_decoder
    ids = [_without_end(added, one.token_ids) if one.finished else one.token_ids for one in completions]
    texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
    for index, one in enumerate(completions):
        if isinstance(one, Conversed) and one.mask is not None:
            (texts[index],) = tokenizer.batch_decode([one.token_ids], skip_special_tokens=False)
    return texts


def _without_end(added: Container[int], ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the ids of a turn without the token that ended it, which a tokenizer may have as one that is not special.

    Args:
        added: ids of the tokenizer's added tokens.
    """
    return ids[:-1] if len(ids) and int(ids[-1]) in added else ids
