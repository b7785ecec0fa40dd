"""The loop of generation: feed the engines, score what they return, write it, until every block is finished."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hpc_rl.config.generate import GenerateConfig
from hpc_rl.errors import EXIT_STOPPED, RunError
from hpc_rl.host.heartbeat import heart
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.generation.feeder import Feeder
from hpc_rl.rl.generation.plan import Block, Plan
from hpc_rl.rl.generation.responses import Parts, response_rows
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.rl.scoring import Scoring, response_texts
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POLL_S = 0.5
"""Time between two looks at the stop file."""
MOST_SCORING = 16
"""Blocks that wait for their scores. If there are more, the engines wait: the reward is slower than they are."""
MOST_FAILED = 1024
"""If the reward fails for so many responses, and for no other, the run ends."""
IN_VAIN = (
    "the walltime ends before the first block of responses of this attempt is finished, and another attempt would not "
    "change that: raise --time, or make a block smaller (rollout.max_num_seqs)"
)


@dataclass(frozen=True)
class BlockResult:
    """A block that is scored and written."""

    block: Block
    completions: list[Completion]
    scores: Scores | None


@dataclass
class Generation:
    """Everything that the loop works with."""

    config: GenerateConfig
    tokenizer: PreTrainedTokenizerBase
    plan: Plan
    blocks: list[Block]
    """Those that are not finished."""
    parts: Parts
    feeder: Feeder
    scoring: Scoring | None
    tracker: Tracker
    stopping: Stopping
    done: int
    """Finished blocks, of this attempt and of earlier ones."""
    began: float = field(default_factory=time.monotonic)
    attempted: int = 0
    """Blocks of this attempt that are written."""
    responses: int = 0
    """Responses of this attempt that are written."""
    tokens: int = 0
    """Their tokens."""
    unscored: list[int] = field(default_factory=list)
    """The blocks of this attempt, as long as the reward has failed for each of their responses."""


def generate(state: Generation) -> int:
    """Generate to the end, or until the run directory has a stop file.

    Blocks that are not finished when the run stops are discarded.

    Returns:
        the process's exit code: 0, or 75 if the run stopped early and resumes when it is started again.

    Raises:
        RunError: an engine died, or the reward failed for all of many responses.
    """
    waiting = deque(state.blocks)
    scoring: deque[Future[BlockResult]] = deque()
    with ThreadPoolExecutor(max_workers=1) as scorer, heart.phase("generate"):
        while waiting or len(state.feeder) or scoring:
            if state.stopping.due(0.0):
                scorer.shutdown(wait=False, cancel_futures=True)
                return _stopped(state)
            while waiting and state.feeder.has_room and len(scoring) < MOST_SCORING:
                state.feeder.feed(waiting.popleft())
            for block, completions in state.feeder.completed(POLL_S) if len(state.feeder) else []:
                scoring.append(scorer.submit(finish_block, state, block, completions))
            if not len(state.feeder) and scoring:
                _wait_for(scoring[0])
            while scoring and scoring[0].done():
                record(state, scoring.popleft().result())
    state.parts.join()
    return 0


def finish_block(state: Generation, block: Block, completions: list[Completion]) -> BlockResult:
    """Score the responses of a block and write them. This runs in a thread beside the loop."""
    prompts = [asked.prompt for asked in block.asked for _ in range(state.plan.n)]
    scores = None if state.scoring is None else state.scoring.start(prompts, completions).wait()
    texts = response_texts(state.tokenizer, completions)
    config = state.config
    rows = response_rows(block, completions, texts, scores, config.data, config.rollout.logprobs)
    state.parts.write(block.number, rows)
    return BlockResult(block, completions, scores)


def record(state: Generation, result: BlockResult) -> None:
    """Record a finished block as a step of the run's metrics."""
    state.done += 1
    state.attempted += 1
    heart.at_step(state.done)
    seconds = time.monotonic() - state.began
    lengths = np.array([len(completion.token_ids) for completion in result.completions])
    state.responses += len(lengths)
    state.tokens += int(lengths.sum())
    state.stopping.note_step({"timing_s/gen": seconds / (state.responses / len(lengths))})
    metrics = {
        "generate/responses": float(min(state.done * state.plan.block_prompts, state.plan.prompts) * state.plan.n),
        "response_length/mean": float(lengths.mean()),
        "response_length/clip_ratio": float(np.mean([not c.finished for c in result.completions])),
        "perf/responses_per_s": state.responses / seconds,
        "perf/tokens_per_s": state.tokens / seconds,
        **({} if result.scores is None else score_metrics(result.scores)),
    }
    state.tracker.log(state.done, metrics, state.plan.blocks)
    if result.scores is not None:
        refuse_no_scores(state, result.block, result.scores)


def refuse_no_scores(state: Generation, block: Block, scores: Scores) -> None:
    """Raise RunError if the reward has failed for all responses of this attempt, and these are many, or the last ones.
    Their blocks are discarded, so that a run with a repaired reward generates them again."""
    if len(scores.errors) < len(scores.values) or len(state.unscored) < state.attempted - 1:
        state.unscored.clear()
        return
    state.unscored.append(block.number)
    if state.responses >= MOST_FAILED or state.done == state.plan.blocks:
        state.parts.discard(state.unscored)
        raise RunError(
            f"none of {state.responses:,} responses could be scored; the first error: {scores.errors[0][1]}: repair "
            "the reward and start the run again"
        )


def score_metrics(scores: Scores) -> dict[str, float]:
    """Return the mean score of the responses that have one, and the number of failed rewards."""
    found = scores.values[~np.isnan(scores.values)]
    means = {f"reward/{name}": mean for name, mean in scores.component_means().items()}
    mean = {"generate/score": float(found.mean())} if len(found) else {}
    return {**mean, "generate/reward_errors": float(len(scores.errors)), **means}


def _stopped(state: Generation) -> int:
    if state.stopping.is_in_vain():
        raise RunError(IN_VAIN)
    print(f"stopped after block {state.done} of {state.plan.blocks}: submit again to resume", flush=True)
    return EXIT_STOPPED


def _wait_for(scored: Future[BlockResult]) -> None:
    """Wait for the scores of a block, but no longer than until the next look at the stop file."""
    with heart.waiting():
        wait_for([scored], POLL_S)
