"""Turns of the policy that coroutines can await: the border between an event loop and the thread of the request queue.

    turns = TurnRequests(queue, loop)
    turns.start(coroutine)                           # in which: completion, engine = await turns.request(...)[0]
    turns.advance(timeout_s)                         # engines generate, and coroutines get what is complete

The request queue is for one thread at a time, which calls `advance`; coroutines run in the thread of a LoopThread. They
share nothing but the inbox: coroutines put functions into it, and `advance` calls them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from hpc_rl.data.prompts import Prompt
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.converse.loop_thread import LoopThread
from hpc_rl.rl.rollout.engine import Completion
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.rl.rollout.respondent import Samplings

Turn = tuple[Completion, int]
"""A turn of the policy, and the engine that generated it."""


class TurnRequests:
    """The turns that coroutines await, on their way through the queue."""

    def __init__(self, queue: RequestQueue, loop: LoopThread) -> None:
        self._queue, self._loop = queue, loop
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._news = threading.Event()
        """Something is in the inbox."""
        self._generating: dict[int, tuple[QueuedResponses, asyncio.Future[Turn]]] = {}
        """Who awaits the turn, by the number of its request."""

    def request(
        self, prompt: Prompt, draws: Samplings, wave: int, engine: int | None = None
    ) -> list[asyncio.Future[Turn]]:
        """Request turns with the same prompt, which share an engine. A coroutine calls this.

        Args:
            draws: seed and sampling of each; see RequestQueue.ask.
            engine: the one that generated the turn before.
        """
        turns: list[asyncio.Future[Turn]] = [asyncio.get_running_loop().create_future() for _ in draws]
        self.post(partial(self._ask, prompt, draws, wave, engine, turns))
        return turns

    def post(self, function: Callable[[], object]) -> None:
        """Let the thread of the queue call a function. What it raises, `advance` raises."""
        self._inbox.put(function)
        self._news.set()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine in the event loop. What it raises, `advance` raises."""
        self._loop.start(coroutine).add_done_callback(lambda done: self.post(done.result))

    def advance(self, timeout_s: float) -> None:
        """Let the engines generate, or coroutines go on if none has requested a turn, at most this long.

        Raises:
            UserError: an engine refused a request; or what a coroutine has raised.
            RunError: too many engines have died; or what a coroutine has raised.
        """
        self._call_posted()
        if self._generating:
            self._queue.turn(timeout_s)
            self._hand_over()
        else:
            with heart.waiting():
                self._news.wait(timeout_s)
        self._call_posted()

    def _call_posted(self) -> None:
        self._news.clear()
        while not self._inbox.empty():
            self._inbox.get()()

    def _ask(
        self,
        prompt: Prompt,
        draws: Samplings,
        wave: int,
        engine: int | None,
        turns: Sequence[asyncio.Future[Turn]],
    ) -> None:
        asked = self._queue.ask(prompt, draws, wave, engine)
        for request, turn in zip(asked.requests, turns, strict=True):
            self._generating[request.number] = asked, turn

    def _hand_over(self) -> None:
        """Give the turns that are complete to those who await them."""
        for number in [number for number, (asked, _) in self._generating.items() if number in asked.found]:
            asked, turn = self._generating.pop(number)
            self._loop.call(partial(_resolve, turn, (asked.found[number], asked.engines[number])))


def _resolve(turn: asyncio.Future[Turn], found: Turn) -> None:
    if not turn.done():  # its coroutine may have been cancelled
        turn.set_result(found)
