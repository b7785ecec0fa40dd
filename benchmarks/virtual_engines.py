"""Rollout engines on a virtual clock, behind the real `Dispatch`: which response is complete when, without a model.

All responses that an engine computes get a token at the same time. `step_s` returns the seconds of such a step, by the
number of responses. When one is complete, the next one that waits in the engine takes its place at once.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.rollout.dispatch import Dispatch
from hpc_rl.rl.rollout.engine import Completion, Request, Span
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from hpc_rl.rl.rollout.respondent import Samplings

StepSeconds = Callable[[int], float]

_NO_IDS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class _Row(NamedTuple):
    """A response that is being computed."""

    end: float
    """Steps of the engine after which it is complete."""
    number: int
    begins: list[tuple[int, float]]
    """Each version of the weights that computes it, with the steps of the engine before."""


class VirtualEngine:
    """One engine. Its clock may be behind that of the driver, which calls `advance` when a response is due.

    Args:
        places: responses that it computes at a time.
    """

    def __init__(self, places: int, step_s: StepSeconds) -> None:
        self._places = places
        self._step_s = step_s
        self._now = self._steps = 0.0
        self._rows: list[_Row] = []
        self._waiting: deque[tuple[int, int]] = deque()
        self._version = 0
        self.busy_s = 0.0
        """Seconds with at least one response."""

    @property
    def due(self) -> float:
        """Time at which the next response is complete."""
        if not self._rows:
            return math.inf
        return self._now + (self._rows[0].end - self._steps) * self._step_s(len(self._rows))

    def add(self, now: float, requests: Iterable[tuple[int, int]]) -> None:
        """Add requests: number, and tokens of the response."""
        self._move(now)
        self._waiting += requests
        self._admit()

    def advance(self, now: float) -> list[tuple[int, tuple[Span, ...]]]:
        """Generate until this time. Return the number and the spans of each response that is complete."""
        found = []
        while (due := self.due) <= now:
            self._move(due)
            row = heapq.heappop(self._rows)
            self._steps = max(self._steps, row.end)
            found.append((row.number, _spans(row)))
            self._admit()
        self._move(now)
        return found

    def change_weights(self, now: float, seconds: float, version: int, token_s: float) -> None:
        """Stop for some seconds and continue with other weights, which compute the tokens of all responses again.

        Args:
            token_s: seconds to compute a token again.
        """
        self._move(now)
        tokens = sum(self._steps - row.begins[0][1] for row in self._rows)
        for row in self._rows:
            row.begins.append((version, self._steps))
        self._version = version
        self._now = now + seconds + tokens * token_s
        self.busy_s += tokens * token_s

    @property
    def steps(self) -> float:
        """Tokens so far of a response that has been computed from the beginning."""
        return self._steps

    def progress(self, steps: float) -> dict[int, float]:
        """Return the tokens that each response which is being computed had when `steps` was this number."""
        return {row.number: max(0.0, steps - row.begins[0][1]) for row in self._rows}

    def skip(self, now: float, busy_s: float = 0.0) -> None:
        """Go to this time without generating, and then compute something else for some seconds, such as prompts."""
        self._now = max(self._now, now) + busy_s
        self.busy_s += busy_s

    def _move(self, now: float) -> None:
        """Generate until this time, at which no response is due earlier."""
        if now <= self._now:
            return
        if self._rows:
            self._steps += (now - self._now) / self._step_s(len(self._rows))
            self.busy_s += now - self._now
        self._now = now

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self._places:
            number, tokens = self._waiting.popleft()
            heapq.heappush(self._rows, _Row(self._steps + tokens, number, [(self._version, self._steps)]))


def _spans(row: _Row) -> tuple[Span, ...]:
    """Return which weights computed which tokens, to the nearest token."""
    if len(row.begins) == 1:
        version, begin = row.begins[0]
        return (Span(version, round(row.end - begin)),)
    ends = [round(begin - row.begins[0][1]) for _, begin in row.begins[1:]]
    ends.append(round(row.end - row.begins[0][1]))
    starts = [0, *ends[:-1]]
    return tuple(
        Span(version, end - start)
        for (version, _), start, end in zip(row.begins, starts, ends, strict=True)
        if end > start
    )


class VirtualQueue:
    """All engines as one queue, as `hpc_rl.rl.rollout.request_queue.RequestQueue`, with the same bookkeeping.

    Args:
        lengths: tokens of the responses in the order of the requests; the first follows the last.
        equal_parts: whether each engine gets an equal part of the waiting requests at once, without `Dispatch`.
    """

    def __init__(
        self, engines: int, places: int, step_s: StepSeconds, lengths: Sequence[int], equal_parts: bool = False
    ) -> None:
        self._engines = [VirtualEngine(places, step_s) for _ in range(engines)]
        self._dispatch = Dispatch(engines, places)
        self._lengths = lengths
        self._new: list[Request] | None = [] if equal_parts else None
        self._asked: dict[int, QueuedResponses] = {}
        self._due = np.full(engines, math.inf)
        self._number = 0
        self.complete_groups = 0
        """Prompts so far whose responses are all complete."""

    def __len__(self) -> int:
        """Return the number of requests that are not complete."""
        return len(self._asked)

    @property
    def busy_s(self) -> float:
        """Seconds that an engine has generated, on average."""
        return sum(engine.busy_s for engine in self._engines) / len(self._engines)

    @property
    def due(self) -> float:
        """Time at which the next response is complete."""
        return float(self._due.min())

    @property
    def running(self) -> int:
        """Number of requests that the engines have."""
        if self._new is not None:
            return len(self._asked)
        return sum(self._dispatch.running(index) for index in range(len(self._engines)))

    def ask(self, prompt: Prompt, draws: Samplings, wave: int = 0) -> QueuedResponses:
        """See RequestQueue."""
        first, self._number = self._number, self._number + len(draws)
        asked = QueuedResponses([Request(first + index, prompt.token_ids, *draw) for index, draw in enumerate(draws)])
        self._asked.update((request.number, asked) for request in asked.requests)
        if self._new is None:
            self._dispatch.add(asked.requests, wave)
        else:
            self._new += asked.requests
        return asked

    def assign(self, now: float) -> None:
        """Give waiting requests to engines."""
        for index, requests in self._assigned().items():
            engine = self._engines[index]
            engine.add(now, [(each.number, self._lengths[each.number % len(self._lengths)]) for each in requests])
            self._due[index] = engine.due

    def collect(self, now: float) -> None:
        """Let the engines generate until this time, and take what is complete."""
        for index in np.flatnonzero(self._due <= now).tolist():
            for number, spans in self._engines[index].advance(now):
                if self._new is None:
                    self._dispatch.complete(index, number)
                asked = self._asked.pop(number)
                asked.found[number] = Completion(_NO_IDS, _NO_LOGPROBS, True, spans)
                self.complete_groups += asked.is_complete
            self._due[index] = self._engines[index].due

    def change_weights(self, now: float, seconds: float, version: int, token_s: float) -> None:
        """Give all engines other weights; see VirtualEngine."""
        for index, engine in enumerate(self._engines):
            engine.change_weights(now, seconds, version, token_s)
            self._due[index] = engine.due

    def finish(self, now: float) -> None:
        """Set the clocks of all engines to this time, at which no response is due earlier."""
        for engine in self._engines:
            engine.advance(now)

    def _assigned(self) -> dict[int, list[Request]]:
        if self._new is None:
            return self._dispatch.assign()
        size = -(-len(self._new) // len(self._engines))
        parts = {index: self._new[index * size : (index + 1) * size] for index in range(len(self._engines))}
        self._new = []
        return {index: part for index, part in parts.items() if part}
