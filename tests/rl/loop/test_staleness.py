"""The bound on how far engines may be ahead, for any order of completions, rejections and restarts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.order import Position
from hpc_rl.data.prompts import Prompt
from hpc_rl.rewards.scorer import Scores
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.loop.draws import Draws, prompt_order
from hpc_rl.rl.loop.staleness import batches_ahead, staleness_metrics, token_ages
from hpc_rl.rl.rollout.engine import Completion, Request, Sampling, Span
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from tests.rl.ppo_config import STALE, ppo_config

SIZE, N = 4, 2
PROMPTS = [Prompt(np.array([i], np.int32), str(i), {}, f"prompt {i}") for i in range(22)]


@pytest.mark.parametrize(
    "trained, taken, staleness, total, expected",
    [
        (0, 0, 1, 9, 2),
        (0, 1, 1, 9, 1),
        (1, 1, 1, 9, 2),
        (3, 4, 4, 9, 4),
        (3, 4, 0, 9, 0),
        (7, 8, 4, 9, 1),
        (9, 9, 4, 9, 0),
    ],
)
def test_batches_ahead(trained: int, taken: int, staleness: int, total: int, expected: int) -> None:
    assert batches_ahead(trained, taken, staleness, total) == expected


def completion(*spans: tuple[int, int], mask: Sequence[int] | None = None) -> Completion:
    length = sum(tokens for _, tokens in spans)
    observed = None if mask is None else np.array(mask, np.bool_)
    zeros = np.zeros(length, np.float32)
    return Completion(zeros.astype(np.int32), zeros, True, tuple(Span(*span) for span in spans), observed)


def test_ages_of_tokens() -> None:
    both = [completion((3, 2), (5, 1)), completion((4, 3), mask=[1, 0, 1])]
    assert token_ages(both, 5).tolist() == [2, 2, 0, 1, 1]
    assert token_ages([], 5).tolist() == []
    metrics = staleness_metrics(both, 5)
    assert metrics == {"rollout/staleness/mean": 6 / 5, "rollout/staleness/max": 2.0, "rollout/versions/mean": 1.5}


class Engines:
    """Requests whose completion a test decides, with the weights of the moment."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.open: list[tuple[QueuedResponses, Request, int]] = []

    def ask(self, prompt: Prompt, draws: Sequence[tuple[int, Sampling]], wave: int = 0) -> QueuedResponses:
        asked = QueuedResponses([Request(number, prompt.token_ids, *draw) for number, draw in enumerate(draws)])
        self.open += [(asked, request, self.version) for request in asked.requests]
        return asked

    def complete(self, index: int) -> None:
        asked, request, version = self.open.pop(index)
        token = np.array([request.seed % 3], np.int32)
        asked.found[request.number] = Completion(token, np.zeros(1, np.float32), True, (Span(version, 1),))


class Scoring:
    """Scores that arrive when a test decides it: those of every response, or only if prompts do not divide by 3."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.late: list[list[bool]] = []

    def start(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], texts: None = None
    ) -> Pending[Scores]:
        arrived = [False]
        self.late.append(arrived)
        same = [int(prompt.answer) % 3 == 0 for prompt in prompts]
        values = np.array([0 if alike else index % 2 for index, alike in enumerate(same)], np.float32)
        return Pending(lambda _: Scores(values, []), ready=lambda: arrived[0])


class Run:
    """A run as the loop and the thread make it, one event at a time."""

    def __init__(self, config: PpoConfig, at_once: bool, total: int, start: Position, step: int) -> None:
        self.engines, self.scoring = Engines(step), Scoring(at_once)
        order = prompt_order(config, len(PROMPTS), start)
        self.draws = Draws(config, PROMPTS, self.engines, self.scoring, order)  # type: ignore[arg-type]
        self.staleness, self.total = config.rollout.staleness, total
        self.position = self.saved = start
        self.trained = self.taken = step
        self.in_training: list[str] | None = None
        self.batches: list[list[str]] = []

    def turn(self) -> None:
        self.draws.ask(self.taken, batches_ahead(self.trained, self.taken, self.staleness, self.total))
        live = [group for group in self.draws.groups if group.is_informative is not False]
        assert len(live) + self.taken * SIZE <= (self.trained + self.staleness + 1) * SIZE
        self.draws.judge()

    def happens(self, event: int) -> None:
        """Do one of the things that may happen next."""
        late = [arrived for arrived in self.scoring.late if not arrived[0]]
        choices = [("complete", index) for index in range(len(self.engines.open))]
        choices += [("score", index) for index in range(len(late))]
        choices += [("train", 0)] if self.in_training is not None else [("take", 0)]
        what, index = choices[event % len(choices)]
        if what == "complete":
            self.engines.complete(index)
        elif what == "score":
            late[index][0] = True
        elif what == "train":
            self.trained += 1
            self.engines.version = self.trained
            self.in_training, self.saved = None, self.position
        elif (found := self.draws.take()) is not None:
            batch, self.position = found
            self.taken += 1
            self.in_training = [prompt.answer for prompt in batch.prompts[::N]]
            self.batches.append(self.in_training)
            assert token_ages(batch.completions, self.trained).max() <= self.staleness
        self.turn()


@cache
def config_of(staleness: int, filters: bool) -> PpoConfig:
    return ppo_config(
        *STALE, f"rollout.staleness={staleness}", "algorithm.tis_cap=2", f"algorithm.filter_groups={filters}"
    )


@given(
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 10**6), max_size=300),
    st.integers(0, 300),
    st.integers(0, 10**6),
)
def test_never_above_the_bound_and_never_stuck(
    staleness: int, filters: bool, at_once: bool, events: list[int], restart: int, seed: int
) -> None:
    config, total = config_of(staleness, filters), 4
    run, earlier = Run(config, at_once, total, Position(), 0), []
    run.turn()
    chosen = np.random.default_rng(seed)
    number = 0
    while run.trained < total:
        run.happens(events[number] if number < len(events) else int(chosen.integers(10**6)))
        number += 1
        assert number < 20_000, "stuck"
        if number == restart:  # after a kill: what was not trained is generated again
            earlier = run.batches[: run.trained]
            run = Run(config, at_once, total, run.saved, run.trained)
            run.turn()
    useful = [
        PROMPTS[index].answer
        for (index, _), _ in zip(prompt_order(config, len(PROMPTS), Position()), range(60), strict=False)
        if not (filters and index % 3 == 0)
    ]
    assert [answer for batch in earlier + run.batches for answer in batch] == useful[: total * SIZE]
    assert not run.draws.groups and batches_ahead(run.trained, run.taken, staleness, total) == 0
