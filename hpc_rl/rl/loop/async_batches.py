"""Batches that are generated while others are trained (rollout.staleness > 0).

A thread has the engines and fills the next batches. The loop takes them, and has the engines to itself when it gives
them new weights or validates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.mixture import Mixture
from hpc_rl.data.order import Position
from hpc_rl.data.prompts import Prompt
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.loop.draws import Batch, Draws, prompt_order
from hpc_rl.rl.loop.scoring import Scoring
from hpc_rl.rl.loop.staleness import batches_ahead
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.rl.rollout.respondent import TURN_S, Respondent

IDLE_S = 0.05
"""Interval between two looks at scores and at the training, while there is nothing to generate."""


class AsynchronousBatches:
    """See BatchSource. Groups that were generated and not trained are generated again by a resumed run.

    Args:
        engines: the requests of `queue`, or the queue itself.
        queue: what responds to prompts.
        start: position in the data at which to start.
        step: number of steps that have been trained.
        total: steps of the run.
        staleness: returns how many steps engines may be ahead now.
        mixture: the shares of the data files, if they have weights.
    """

    def __init__(
        self,
        config: PpoConfig,
        train: Sequence[Prompt],
        engines: RequestQueue,
        queue: Respondent,
        scoring: Scoring,
        start: Position,
        step: int,
        total: int,
        staleness: Callable[[], int],
        mixture: Mixture | None = None,
    ) -> None:
        self._staleness = staleness
        self._total = total
        self._requests = engines
        self._queue = queue
        self._scoring = scoring
        self._draws = Draws(config, train, queue, scoring, prompt_order(config, len(train), start, mixture))
        self.position = start
        self._trained = self._taken = step
        # The thread passes the turnstile before it takes the engines, so that it cannot take them again and again while
        # the loop, which keeps the turnstile closed, waits for them.
        self._turnstile, self._engines = threading.Lock(), threading.Lock()
        self._news = threading.Event()
        """Something has been generated, or the thread has ended."""
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generation")
        self._thread: Future[None] | None = None

    def draw(self, step: int, stops: Callable[[], bool]) -> Batch | None:
        """Wait for the batch of a step, which the thread generates; None if the run stops."""
        self._trained = step
        if self._thread is None:
            self._thread = self._pool.submit(self._generate)
        while True:
            with self.paused():
                if self._thread.done():  # generation has failed
                    self._thread.result()
                if self._requests.is_stranded:
                    self._requests.turn(0.0)
                if not self._scoring.at_once:  # a reward model: only this thread calls the workers
                    self._draws.judge()
                found = self._draws.take()
                if found is not None:
                    batch, self.position = found
                    self._taken = step + 1
                    return batch
            if stops():
                return None
            with heart.waiting():
                self._news.wait(TURN_S)
            self._news.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the thread from the engines during the block."""
        with self._turnstile, self._engines:
            yield

    @property
    def rejected(self) -> int:
        """Groups that dynamic sampling rejected for the latest batch."""
        return self._draws.rejected

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._pool.shutdown()

    def _generate(self) -> None:
        """Generate until `close`. This is the thread."""
        try:
            while not self._closed.is_set():
                with self._turnstile:
                    pass
                with self._engines:
                    is_busy = self._turn()
                self._news.set()
                if not is_busy:
                    self._closed.wait(IDLE_S)
        finally:
            self._news.set()

    def _turn(self) -> bool:
        """Draw prompts, and let the engines generate for a short time. Return whether they had something to do."""
        self._draws.ask(self._taken, batches_ahead(self._trained, self._taken, self._staleness(), self._total))
        is_busy = self._draws.is_generating and not self._requests.is_stranded
        if is_busy:
            self._queue.turn(TURN_S)
        if self._scoring.at_once:
            self._draws.judge()
        return is_busy
