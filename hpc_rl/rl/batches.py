"""From the next prompts to a step's batch of responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpc_rl.config.ppo import PpoConfig
from hpc_rl.data.order import Position
from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.draws import Batch, Desk, Draw, prompt_order
from hpc_rl.rl.rollout.request_queue import TURN_S
from hpc_rl.rl.rollout.respondent import Respondent
from hpc_rl.rl.scoring import Scoring, response_texts
from hpc_rl.tracking.samples import chosen_responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class BatchSource:
    """Generates the batch of each step. Batches depend only on the seed and the step, so that a resumed run gets the
    same batches as an uninterrupted one.

    Args:
        start: position in the data at which to start.
    """

    def __init__(
        self, config: PpoConfig, train: Sequence[Prompt], queue: Respondent, scoring: Scoring, start: Position
    ) -> None:
        self._queue = queue
        self._desk = Desk(config, train, queue, scoring, prompt_order(config, len(train), start))
        self.position = start

    def draw(self, step: int, stops: Callable[[], bool]) -> Batch | None:
        """Generate the batch of a step: train_batch_size prompts with rollout.n responses each.

        Args:
            stops: called before dynamic sampling draws further prompts; returns whether to stop.

        Returns:
            the batch; None if the run stops.

        Raises:
            RunError: algorithm.filter_groups is set, and too few prompts have responses with different scores.
        """
        draw = Draw(self._desk, step)
        while not draw.is_complete:
            if draw.lacks and draw.groups and stops():
                self._queue.pause()
                return None
            draw.ask()
            if draw.is_generating:
                self._queue.turn(TURN_S)
            else:
                draw.wait_for_score()
            draw.judge()
        self._queue.pause()
        self.position = draw.position
        return draw.batch()


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
