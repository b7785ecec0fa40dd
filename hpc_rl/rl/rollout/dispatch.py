"""Which engine generates which request: bookkeeping without Ray and without a clock.

The requests of a group have the same prompt and stay together, because an engine computes a prompt only once. A group
goes to the engine with the most room, and the longest prompts go first (longest processing time first: Graham 1969,
https://doi.org/10.1137/0117039). An engine has a few more requests than it computes at a time, so that it never waits.
All others wait here, so that no engine gets more than its part of the work.

The later turns of a conversation begin with what an engine has computed before, and go to the same one. They go before
new groups of the same wave, because others wait for the end of a conversation.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_rl.rl.rollout.engine import Request

SHARE_IN_RESERVE = 4
"""An engine has one request in reserve for this many that it computes."""


@dataclass(order=True)
class _Group:
    """Requests with the same prompt. Groups are in the order in which engines get them."""

    wave: int
    is_new: bool
    """Whether it is no later turn of a conversation."""
    shortness: int
    """Minus the tokens of the prompt."""
    number: int
    requests: list[Request] = field(compare=False)


@dataclass
class _Engine:
    groups: dict[int, _Group] = field(default_factory=dict)
    """By the number of each request that is not complete: its group."""
    tokens: int = 0
    """Tokens of these requests, if their responses become as long as they may."""
    is_available: bool = True
    later: list[_Group] = field(default_factory=list)
    """A heap: later turns of its conversations, which wait until it has room."""


class Dispatch:
    """The requests that are not complete, and the engines that have them.

    Args:
        engines: how many there are.
        places: requests that one engine computes at a time.
    """

    def __init__(self, engines: int, places: int) -> None:
        self._engines = [_Engine() for _ in range(engines)]
        self._limit = places + -(-places // SHARE_IN_RESERVE)
        self._waiting: list[_Group] = []
        """A heap."""
        self._added = 0

    def add(self, requests: Sequence[Request], wave: int = 0, after: int | None = None) -> None:
        """Add a group.

        Args:
            requests: with the same prompt, and numbers that no other request has.
            wave: groups of a smaller wave go before all others.
            after: the engine that has generated the beginning of the prompt, in an earlier turn of a conversation. The
                group goes to this one, unless it ends before.
        """
        group = _Group(wave, after is None, -len(requests[0].prompt), self._added, list(requests))
        self._added += 1
        if after is not None and self._engines[after].is_available:
            heapq.heappush(self._engines[after].later, group)
        else:
            heapq.heappush(self._waiting, group)

    def assign(self) -> dict[int, list[Request]]:
        """Give waiting groups to engines that have room. Return the new requests of each engine that gets any."""
        assigned: dict[int, list[Request]] = {}
        while (chosen := self._next()) is not None:
            engine, groups = chosen
            taker, group = self._engines[engine], heapq.heappop(groups)
            taker.groups.update((request.number, group) for request in group.requests)
            taker.tokens += sum(map(_tokens, group.requests))
            assigned.setdefault(engine, []).extend(group.requests)
        return assigned

    def complete(self, engine: int, number: int) -> None:
        """Record that an engine has completed a request."""
        had = self._engines[engine]
        group = had.groups.pop(number)
        (request,) = (each for each in group.requests if each.number == number)
        had.tokens -= _tokens(request)

    def lose(self, engine: int) -> int:
        """Let the requests of an engine that has ended wait for others. It gets no more until `restore`.

        Returns:
            how many these are.
        """
        lost = self._engines[engine]
        again: dict[int, list[Request]] = {}
        for number, group in lost.groups.items():
            again.setdefault(group.number, []).extend(each for each in group.requests if each.number == number)
        groups = {group.number: group for group in lost.groups.values()}
        for number, requests in again.items():
            group = groups[number]
            heapq.heappush(self._waiting, _Group(group.wave, group.is_new, group.shortness, number, requests))
        for group in lost.later:
            heapq.heappush(self._waiting, group)
        self._engines[engine] = _Engine(is_available=False)
        return len(lost.groups)

    def restore(self, engine: int) -> None:
        """Give requests to an engine again."""
        self._engines[engine].is_available = True

    def running(self, engine: int) -> int:
        """Return the number of requests that an engine has."""
        return len(self._engines[engine].groups)

    @property
    def capacity(self) -> int:
        """Number of requests that all engines together have at a time."""
        return self._limit * len(self._engines)

    @property
    def available(self) -> list[int]:
        """The engines that get requests."""
        return [index for index, engine in enumerate(self._engines) if engine.is_available]

    def _next(self) -> tuple[int, list[_Group]] | None:
        """Return the heap whose first group is the next, and the engine that gets it; None if nothing can be given."""
        free = [index for index in self.available if self.running(index) < self._limit]
        chosen = [(index, later) for index in free if (later := self._engines[index].later)]
        if free and self._waiting:
            roomiest = min(free, key=lambda index: (self.running(index), self._engines[index].tokens))
            chosen.append((roomiest, self._waiting))
        return min(chosen, key=lambda pair: pair[1][0], default=None)


def _tokens(request: Request) -> int:
    return len(request.prompt) + request.sampling.max_new_tokens
