"""The thread that generates batches, with engines that are functions of the seed alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hpc_rl.data.order import Position
from hpc_rl.errors import RunError
from hpc_rl.rl.loop.async_batches import AsynchronousBatches
from hpc_rl.rl.loop.draws import Batch
from tests.rl.loop.test_batches import PROMPTS, START, Queue, Scoring, by_token, odd
from tests.rl.ppo_config import STALE, ppo_config

TIMEOUT_S = 600
STEPS = 6


class Engines(Queue):
    """As Queue, for two threads: turns are counted, and overlap is an error."""

    def __init__(self, order: int = 0) -> None:
        super().__init__(order)
        self.is_stranded = False
        self.turns = 0
        self.users = 0
        self.fails = False

    def __len__(self) -> int:
        return len(self._open)

    def turn(self, timeout_s: float) -> None:
        self.users += 1
        assert self.users == 1, "two threads use the engines"
        if self.fails:
            raise RunError("no rollout engine is left")
        if self.is_stranded:
            assert threading.current_thread() is threading.main_thread(), "only the loop may send weights"
            self.is_stranded = False
        if self._open:
            super().turn(timeout_s)
        self.turns += 1
        self.users -= 1


@contextmanager
def source(
    *options: str,
    at_once: bool = True,
    score: Callable[..., float] = by_token,
    step: int = 0,
    start: Position = START,
) -> Iterator[tuple[AsynchronousBatches, Engines]]:
    config, engines = ppo_config(*STALE, "rollout.staleness=1", *options), Engines()
    scoring, staleness = Scoring(score, at_once), lambda: config.rollout.staleness
    batches = AsynchronousBatches(config, PROMPTS, engines, engines, scoring, start, step, STEPS, staleness)  # type: ignore[arg-type]
    try:
        yield batches, engines
    finally:
        batches.close()


def drawn(batches: AsynchronousBatches, step: int) -> Batch:
    batch = batches.draw(step, lambda: False)
    assert batch is not None
    return batch


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answers(batch: Batch) -> list[str]:
    return [prompt.answer for prompt in batch.prompts]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("options", [(), ("algorithm.filter_groups=true",)])
def test_batches_are_those_of_a_synchronous_run_in_the_same_order(options: tuple[str, ...], at_once: bool) -> None:
    score = odd if options else by_token
    with source(*options, "data.shuffle=false", "rollout.n=6", score=score, at_once=at_once) as (batches, _):
        found = [answers(drawn(batches, step))[::6] for step in range(STEPS)]
    stream = [str(i) for _ in range(9) for i in range(8) if not options or i % 2]
    assert [answer for batch in found for answer in batch] == stream[: 4 * STEPS]


def test_the_next_batch_is_generated_while_one_is_trained_and_no_further() -> None:
    with source() as (batches, engines):
        drawn(batches, 0)
        await_(lambda: len(engines.asked) == 8 and not len(engines))
        turns = engines.turns
        drawn(batches, 1)
        await_(lambda: len(engines.asked) == 12 and not len(engines))
        assert engines.turns >= turns + 8
        assert [asked[3] for asked in engines.asked] == [step for step in range(3) for _ in range(4)]


def test_nothing_is_generated_beyond_the_last_step() -> None:
    with source("rollout.staleness=4", "algorithm.tis_cap=2") as (batches, engines):
        for step in range(STEPS):
            drawn(batches, step)
        assert len(engines.asked) == 4 * STEPS


def test_a_resumed_run_draws_the_same_prompts_with_the_same_seeds() -> None:
    with source() as (batches, _):
        found = [drawn(batches, step) for step in range(3)]
        position = batches.position
        after = [drawn(batches, step) for step in (3, 4)]
    with source(start=position, step=3) as (batches, _):
        again = [drawn(batches, step) for step in (3, 4)]
    for one, other in zip(after, again, strict=True):
        assert answers(one) == answers(other)
        assert [c.token_ids.tolist() for c in one.completions] == [c.token_ids.tolist() for c in other.completions]
    assert len({tuple(answers(batch)) for batch in found}) == 3


def test_the_loop_has_the_engines_to_itself() -> None:
    with source("rollout.staleness=4", "algorithm.tis_cap=2") as (batches, engines):
        for step in range(STEPS):
            drawn(batches, step)
            with batches.paused():
                turns = engines.turns
                engines.wait([engines.ask(PROMPTS[0], [(1, engines.asked[0][2][0])])])
                waited = threading.Event().wait(0.02)
                assert not waited and engines.turns > turns


def test_engines_that_all_died_are_revived_by_the_loop() -> None:
    with source() as (batches, engines):
        engines.is_stranded = True
        drawn(batches, 0)
        assert not engines.is_stranded


def test_an_error_of_the_thread_ends_the_run() -> None:
    with source() as (batches, engines):
        engines.fails = True
        with pytest.raises(RunError, match="no rollout engine is left"):
            drawn(batches, 0)
        with batches.paused():  # the loop can still save, and send weights
            engines.users = 0


def test_a_stop_ends_the_wait() -> None:
    with source("algorithm.filter_groups=true", score=lambda *_: 1) as (batches, _):
        assert batches.draw(0, lambda: True) is None
        assert batches.position == START
