"""The loop of generation: feed the engines, score what they return, write it, until every block is finished."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hpc_rl.config.rl.generate import GenerateConfig
from hpc_rl.errors import EXIT_STOPPED, RunError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.generation.measures import REWARD_ERRORS, as_metrics, combined, measure
from hpc_rl.rl.generation.plan import Block, GenerationPlan, seeds_of
from hpc_rl.rl.generation.responses import Measures, Parts, response_rows
from hpc_rl.rl.loop.scoring import Scoring, last_turns
from hpc_rl.rl.rollout.engine import Completion, Sampling
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.rl.rollout.respondent import Respondent, Responses
from hpc_rl.tracking.tracker import Tracker
from hpc_rl.training.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POLL_S = 0.5
"""Time between two looks at the stop file."""
DEPTH = 3
"""Blocks per engine: one whose last responses are generated, one that takes their places, and one for the time until
the driver reacts."""
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
    measures: Measures


@dataclass
class Generation:
    """Everything that the loop works with."""

    config: GenerateConfig
    tokenizer: PreTrainedTokenizerBase
    plan: GenerationPlan
    blocks: list[Block]
    """Those that are not finished."""
    parts: Parts
    queue: RequestQueue
    """The engines."""
    respondent: Respondent
    """What they respond through."""
    engines: int
    """How many these are."""
    sampling: Sampling
    scoring: Scoring | None
    tracker: Tracker
    stopping: Stopping
    done: int
    """Finished blocks, of this attempt and of earlier ones."""
    began: float = field(default_factory=time.monotonic)
    responses: int = 0
    """Responses of this attempt that are written."""
    tokens: int = 0
    """Their tokens."""
    measures: Measures = field(default_factory=dict)
    """Of all finished blocks, of this attempt and of earlier ones."""


class NothingScoredError(RunError):
    """The reward fails for everything."""


def generate(state: Generation) -> int:
    """Generate to the end, or until the run directory has a stop file.

    Blocks that are not finished when the run stops are discarded. At the end, the scoring is closed. If the reward has
    failed for everything, finished blocks are discarded too, so that a run with a repaired reward generates them again.

    Returns:
        the process's exit code: 0, or 75 if the run stopped early and resumes when it is started again.

    Raises:
        NothingScoredError: the reward failed for all of many responses.
        RunError: an engine died.
    """
    try:
        with heart.phase("generate"), _finisher(state) as finisher:
            is_complete = _finish_blocks(state, finisher)
    except NothingScoredError:
        state.parts.discard(state.parts.finished())
        raise
    if not is_complete:
        return _stopped(state)
    state.parts.join()
    return 0


def _finish_blocks(state: Generation, finisher: ThreadPoolExecutor) -> bool:
    """Finish all blocks; return False if the run has to stop before."""
    waiting = deque(state.blocks)
    generating: list[tuple[Block, list[Responses]]] = []
    scoring: deque[Future[BlockResult]] = deque()
    while waiting or generating or scoring:
        if state.stopping.due(0.0):
            return False
        while waiting and len(generating) < DEPTH * state.engines and len(scoring) < MOST_SCORING:
            generating.append(_request(state, waiting.popleft()))
        if generating:
            state.respondent.turn(POLL_S)
        left = []
        for block, asked in generating:
            if all(responses.is_complete for responses in asked):
                completions = [completion for responses in asked for completion in responses.completions()]
                scoring.append(finisher.submit(finish_block, state, block, completions))
            else:
                left.append((block, asked))
        generating = left
        if not generating and scoring:
            _wait_for(scoring[0])
        while scoring and scoring[0].done():
            record(state, scoring.popleft().result())
    return True


def _request(state: Generation, block: Block) -> tuple[Block, list[Responses]]:
    """Request the responses of a block. Earlier blocks go first."""
    block = replace(block, prompts=list(block.prompts))  # so that rows are read once
    n, seeds = state.plan.n, seeds_of(block, state.plan)
    return block, [
        state.respondent.ask(
            one.prompt, [(seed, state.sampling) for seed in seeds[index * n : (index + 1) * n]], block.number
        )
        for index, one in enumerate(block.prompts)
    ]


@contextmanager
def _finisher(state: Generation) -> Iterator[ThreadPoolExecutor]:
    """Yield the thread for `finish_block`. At the end it is idle: a block that still waits for its scores fails, so
    that neither a stop nor an error waits for a slow reward."""
    finisher = ThreadPoolExecutor(max_workers=1)
    try:
        yield finisher
    finally:
        finisher.shutdown(wait=False, cancel_futures=True)
        if state.scoring is not None:
            state.scoring.close()
        finisher.shutdown()


def finish_block(state: Generation, block: Block, completions: list[Completion]) -> BlockResult:
    """Score the responses of a block and write them. This runs in a thread beside the loop."""
    prompts = [asked.prompt for asked in block.prompts for _ in range(state.plan.n)]
    texts = last_turns(state.tokenizer, completions)
    scores = None if state.scoring is None else state.scoring.start(prompts, completions, texts).wait()
    config = state.config
    rows = response_rows(block, completions, texts, scores, config.data, config.rollout.logprobs)
    measures = measure(completions, scores)
    state.parts.write(block.number, rows, measures)
    return BlockResult(block, completions, scores, measures)


def record(state: Generation, result: BlockResult) -> None:
    """Record a finished block as a step of the run's metrics, which are those of all responses so far."""
    state.done += 1
    heart.at_step(state.done)
    seconds = time.monotonic() - state.began
    responses = len(result.completions)
    state.responses += responses
    state.tokens += sum(completion.sampled for completion in result.completions)
    state.measures = combined([state.measures, result.measures])
    state.stopping.note_step({"timing_s/gen": seconds / (state.responses / responses)})
    metrics = {
        "generate/responses": float(_finished_responses(state)),
        "perf/responses_per_s": state.responses / seconds,
        "perf/tokens_per_s": state.tokens / seconds,
        **as_metrics(state.measures),
    }
    state.tracker.log(state.done, metrics, state.plan.blocks)
    if result.scores is not None:
        refuse_no_scores(state, result.scores)


def _finished_responses(state: Generation) -> int:
    """Return the number of responses in finished blocks, of this attempt and of earlier ones."""
    return min(state.done * state.plan.block_prompts, state.plan.prompts) * state.plan.n


def refuse_no_scores(state: Generation, scores: Scores) -> None:
    """Raise NothingScoredError if no finished response of the run has a score, and these are many, or all."""
    responses = _finished_responses(state)
    errors, counted = state.measures[REWARD_ERRORS]
    if errors == counted and (responses >= MOST_FAILED or state.done == state.plan.blocks):
        raise NothingScoredError(
            f"none of {responses:,} responses could be scored; the first error: {scores.errors[0][1]}; repair the "
            "reward and submit the run again"
        )


def _stopped(state: Generation) -> int:
    if state.stopping.is_in_vain():
        raise RunError(IN_VAIN)
    print(f"stopped after block {state.done} of {state.plan.blocks}", flush=True)
    return EXIT_STOPPED


def _wait_for(scored: Future[BlockResult]) -> None:
    """Wait for the scores of a block, but no longer than until the next look at the stop file."""
    with heart.waiting():
        wait_for([scored], POLL_S)
