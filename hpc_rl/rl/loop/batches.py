"""Where the loop gets the batch of each step from: `SynchronousBatches` here, or `AsynchronousBatches`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.mixture import Mixture
from hpc_rl.data.order import Position
from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.loop.computed import ComputedColumns
from hpc_rl.rl.loop.draws import Batch, Draws, prompt_order, responses_of
from hpc_rl.rl.loop.scoring import Scoring, response_texts
from hpc_rl.rl.rollout.respondent import TURN_S, Respondent
from hpc_rl.tracking.samples import chosen_responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BatchSource(Protocol):
    """The batches of a run. Each has the next prompts of the data, so that a resumed run trains on the prompts that an
    uninterrupted one would have trained on."""

    position: Position
    """In the data, after the latest batch: where a resumed run starts."""

    def draw(self, step: int, stops: Callable[[], bool]) -> Batch | None:
        """Return the batch of a step, for which this waits: train_batch_size prompts with rollout.n responses each.

        Args:
            step: number of steps that have been trained.
            stops: called from time to time; returns whether the run stops.

        Returns:
            the batch; None if the run stops.

        Raises:
            NoBatchError: algorithm.filter_groups is set, and too few prompts have responses with different scores, or
                none of the responses could be scored.
        """
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Return a block in which only the caller uses the engines."""
        ...

    @property
    def rejected(self) -> int:
        """Groups that dynamic sampling rejected for the latest batch."""
        ...

    def close(self) -> None:
        """Stop generating."""
        ...


class SynchronousBatches:
    """Generates the batch of a step when the step needs it, with the weights of this step. Batches depend only on the
    seed and the step.

    Args:
        start: position in the data at which to start.
        computed: computes columns of the mini-batches that are complete.
        mixture: the shares of the data files, if they have weights.
    """

    def __init__(
        self,
        config: PpoConfig,
        train: Sequence[Prompt],
        queue: Respondent,
        scoring: Scoring,
        start: Position,
        computed: ComputedColumns,
        mixture: Mixture | None = None,
    ) -> None:
        self._queue = queue
        self._n = config.rollout.n
        self._computed = computed
        self._may_take_long = config.agent.is_used or config.rollout.engines == "lent"
        self._draws = Draws(config, train, queue, scoring, prompt_order(config, len(train), start, mixture))
        self.position = start

    def draw(self, step: int, stops: Callable[[], bool]) -> Batch | None:
        """Generate and return the batch of a step; None if the run stops. `stops` is called before dynamic sampling
        draws further prompts, and all the time if agents write the responses or all engines may leave."""
        draws = self._draws
        while (found := draws.take()) is None:
            if draws.groups and (draws.lacks() or self._may_take_long) and stops():
                self._queue.pause()
                return None
            draws.ask(step)
            if draws.is_generating:
                self._queue.turn(TURN_S)
            else:
                draws.wait_for_score()
            draws.judge()
            if (awaited := self._computed.awaits) is not None:
                self._computed.begin(*responses_of(draws.settled(awaited), self._n))
        self._queue.pause()
        batch, self.position = found
        return batch

    def paused(self) -> AbstractContextManager[None]:
        """Return a block that does nothing: between two calls of `draw`, nothing is generated."""
        return nullcontext()

    @property
    def rejected(self) -> int:
        """Groups that dynamic sampling rejected for the latest batch."""
        return self._draws.rejected

    def close(self) -> None:
        """Do nothing: between two calls of `draw`, nothing is generated."""


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
