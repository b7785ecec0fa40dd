"""Coroutines that await turns, with a queue that completes one request in each of its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hpc_rl.data.prompts import Prompt
from hpc_rl.errors import RunError
from hpc_rl.rl.converse.loop_thread import LoopThread
from hpc_rl.rl.converse.turns import TurnRequests
from hpc_rl.rl.rollout.engine import Completion, Request, Sampling
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from hpc_rl.rl.rollout.respondent import Samplings

PROMPT = Prompt(np.arange(3, dtype=np.int32), None, {}, "")
DRAWS = [(seed, Sampling(9)) for seed in (5, 6)]
TIMEOUT_S = 60.0


class Queue:
    """A RequestQueue whose completions have the seed of the request; the latest request is completed first."""

    def __init__(self) -> None:
        self._open: list[tuple[QueuedResponses, Request]] = []
        self._asked = 0

    def ask(self, prompt: Prompt, draws: Samplings, wave: int, engine: int | None) -> QueuedResponses:
        first, self._asked = self._asked, self._asked + len(draws)
        asked = QueuedResponses([Request(first + index, prompt.token_ids, *draw) for index, draw in enumerate(draws)])
        self._open += [(asked, request) for request in asked.requests]
        return asked

    def turn(self, timeout_s: float) -> None:
        asked, request = self._open.pop()
        tokens = np.array([request.seed], np.int32)
        asked.found[request.number] = Completion(tokens, np.zeros(1, np.float32), True)
        asked.engines[request.number] = 7


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.close()
    assert thread.is_closed


def test_turns_come_back_to_who_awaits_them(loop: LoopThread) -> None:
    turns, found = TurnRequests(Queue(), loop), []  # type: ignore[arg-type, var-annotated]

    async def converse() -> None:
        for completion, engine in [await turn for turn in turns.request(PROMPT, DRAWS, 0)]:
            found.append((completion.token_ids.tolist(), engine))
        turns.post(lambda: found.append("end"))

    turns.start(converse())
    while "end" not in found:
        turns.advance(TIMEOUT_S)
    assert found == [([5], 7), ([6], 7), "end"]


def test_what_a_coroutine_raises_is_raised_once(loop: LoopThread) -> None:
    turns = TurnRequests(Queue(), loop)  # type: ignore[arg-type]

    async def failing() -> None:
        raise RunError("no environment is left")

    turns.start(failing())
    with pytest.raises(RunError, match="no environment is left"):
        turns.advance(TIMEOUT_S)
    turns.advance(0.0)


def test_the_end_of_a_loop_cancels_its_coroutines() -> None:
    loop, ended = LoopThread("test"), []

    async def waiting() -> Any:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    future = loop.start(waiting())
    assert loop.ask(lambda: 3) == 3
    loop.close()
    assert ended == [True] and future.cancelled() and loop.is_closed
    loop.call(lambda: ended.append(False))
    loop.close()
