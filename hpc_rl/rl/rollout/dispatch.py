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
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_rl.rl.rollout.engine import Completion, Request

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
        """Also those that have gone: lent engines may come and leave thousands of times."""
        self.present = list(range(engines))
        """The engines that have not gone, in order."""
        self.available = list(range(engines))
        """The engines that get requests, in order."""
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
        if after is not None and after in self.available:
            heapq.heappush(self._engines[after].later, group)
        else:
            heapq.heappush(self._waiting, group)

    def assign(self, coming: int = 0) -> dict[int, list[Request]]:
        """Give waiting groups to engines that have room. Return the new requests of each engine that gets any.

        Args:
            coming: engines that will get requests soon. Their equal part of all requests waits for them.
        """
        assigned: dict[int, list[Request]] = {}
        limit = self._limit
        if coming:
            requests = sum(len(group.requests) for group in self._waiting) + sum(map(self.running, self.available))
            limit = min(limit, -(-requests // (len(self.available) + coming)))
        while (chosen := self._next(limit)) is not None:
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

    def add_engine(self) -> int:
        """Add an engine, which gets requests after `restore`; return its index."""
        self._engines.append(_Engine())
        self.present.append(len(self._engines) - 1)
        return self.present[-1]

    def withhold(self, engine: int) -> None:
        """Give an engine no more requests until `restore`. It keeps those that it has."""
        if engine in self.available:
            self.available.remove(engine)
        withheld = self._engines[engine]
        while withheld.later:  # with other weights, it has to compute these conversations again as well
            heapq.heappush(self._waiting, withheld.later.pop())

    def lose(self, engine: int, is_gone: bool = False, begun: Mapping[int, Completion] | None = None) -> int:
        """Let the requests of an engine that has ended wait for others. It gets no more until `restore`.

        Args:
            is_gone: whether no other one comes in its place.
            begun: the tokens that others will continue, by number of the request. The prompt of each is then its own.

        Returns:
            how many these are.
        """
        lost = self._engines[engine]
        again: dict[int, list[Request]] = {}
        for number, group in lost.groups.items():
            (request,) = (each for each in group.requests if each.number == number)
            if begun and number in begun:
                rest = request.after(begun[number])
                heapq.heappush(self._waiting, _Group(group.wave, False, -len(rest.prompt), self._added, [rest]))
                self._added += 1
            else:
                again.setdefault(group.number, []).append(request)
        groups = {group.number: group for group in lost.groups.values()}
        for number, requests in again.items():
            group = groups[number]
            heapq.heappush(self._waiting, _Group(group.wave, group.is_new, group.shortness, number, requests))
        self.withhold(engine)
        self._engines[engine] = _Engine()
        if is_gone:
            self.present.remove(engine)
        return len(lost.groups)

    def restore(self, engine: int) -> None:
        """Give requests to an engine again."""
        if engine not in self.available:
            insort(self.available, engine)

    def running(self, engine: int) -> int:
        """Return the number of requests that an engine has."""
        return len(self._engines[engine].groups)

    @property
    def capacity(self) -> int:
        """Number of requests that all engines together have at a time."""
        return self._limit * len(self.present)

    def _next(self, limit: int) -> tuple[int, list[_Group]] | None:
        """Return the heap whose first group is the next, and the engine that gets it; None if nothing can be given.

        Args:
            limit: an engine with so many requests gets no new groups.
        """
        free = [index for index in self.available if self.running(index) < self._limit]
        chosen = [(index, later) for index in free if (later := self._engines[index].later)]
        if free and self._waiting:
            roomiest = min(free, key=lambda index: (self.running(index), self._engines[index].tokens))
            if self.running(roomiest) < limit:
                chosen.append((roomiest, self._waiting))
        return min(chosen, key=lambda pair: pair[1][0], default=None)


def _tokens(request: Request) -> int:
    return len(request.prompt) + request.sampling.max_new_tokens
