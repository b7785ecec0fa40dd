"""The requests of a run on their way through the engines.

    asked = queue.ask(prompt, [(seed, sampling)])   # waits until an engine has room
    while not asked.is_complete:
        queue.turn(timeout_s)                       # engines generate for a short time, and return what is complete
    asked.completions()

An engine generates only in calls of `advance`, each of which takes new requests along and lasts for a slice of time. It
always has two of them, so that it never waits for the driver. Its weights change between two calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import ray
from ray.exceptions import RayTaskError

from hpc_rl.data.prompts import Prompt
from hpc_rl.errors import RunError, UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.actors.calls import MODEL_LIMIT, ActorCall, Pending
from hpc_rl.rl.actors.deaths import ActorDiedError
from hpc_rl.rl.rollout.dispatch import Dispatch
from hpc_rl.rl.rollout.engine import Completion, Request, SliceResult
from hpc_rl.rl.rollout.respondent import TURN_S, Respondent, Samplings
from hpc_rl.rl.weights.base import EngineActors
from hpc_rl.training.perf import Spans

SLICE_S = 0.1
"""Time of a call. Within it, complete responses wait for their rewards, and new requests for their engine."""
CALLS_PER_S = 200
"""Most calls to all engines together: with many engines, the slices are longer. A call takes 1.4 ms of the driver."""
CALLS_AHEAD = 2


@dataclass
class QueuedResponses:
    """The responses to one prompt that were requested together."""

    requests: list[Request]
    found: dict[int, Completion] = field(default_factory=dict)
    """By the number of the request."""
    engines: dict[int, int] = field(default_factory=dict)
    """Which engine generated it, by the number of the request."""

    @property
    def is_complete(self) -> bool:
        """Whether there are all responses."""
        return len(self.found) == len(self.requests)

    def completions(self) -> list[Completion]:
        """Return the responses in the order in which they were requested."""
        return [self.found[request.number] for request in self.requests]


class RequestQueue(Respondent):
    """All engines of a run, as one queue.

    Args:
        engines: actors with the method `advance` of EngineProcess.
        places: requests that one engine computes at a time (rollout.max_num_seqs).
        stall_s: an engine that does not answer for so long is ended.
        start_s: longest time in which an engine starts.
        replace: called if an engine has died, or one in the place of another did not start, with its index. It returns
            the call that starts another in its place, or raises the error if there is no other.
        revive: called at the beginning of a turn if all engines that have started wait for `restore`, which it has to
            call. None: an engine that has started gets requests at once.
    """

    def __init__(
        self,
        engines: EngineActors,
        places: int,
        stall_s: float,
        start_s: float,
        replace: Callable[[int, Exception], ActorCall],
        revive: Callable[[], None] | None = None,
    ) -> None:
        count = len(engines.actors)
        self._engines = engines
        self._stall_s = stall_s
        self._start_s = start_s
        self._replace = replace
        self._revive = revive
        self._dispatch = Dispatch(count, places)
        self._slice_s = slice_of(count)
        self._calls: list[deque[ActorCall]] = [deque() for _ in range(count)]
        self._held: list[list[Request]] = [[] for _ in range(count)]
        """New requests of each engine, for its next call: more calls at a time would delay what they bring."""
        self._starting: dict[int, ActorCall] = {}
        """Engines that load their models in the place of others."""
        self.started: set[int] = set()
        """Those that have loaded their models, and wait for `restore`."""
        self._heard = [time.monotonic()] * count
        self._asked: dict[int, QueuedResponses] = {}
        """The requests that are not complete, by number."""
        self._number = 0
        self.version = 0
        """Number of weight updates of this attempt."""
        self.repeated = 0
        """Requests that were repeated because their engine died."""
        self._busy_s = 0.0
        self.spans = Spans()
        """When any engine generated."""

    @property
    def busy_s(self) -> float:
        """Seconds that an engine has generated, on average."""
        return self._busy_s / len(self._calls)

    @property
    def capacity(self) -> int:
        """Number of requests that all engines together have at a time; the others wait here."""
        return self._dispatch.capacity

    def ask(self, prompt: Prompt, draws: Samplings, wave: int = 0, after: int | None = None) -> QueuedResponses:
        """Request responses to one prompt, which share an engine.

        Args:
            draws: seed and sampling of each response; see Request.
            wave: prompts of a smaller wave go first.
            after: the engine of an earlier turn; see Dispatch.add.
        """
        first, self._number = self._number, self._number + len(draws)
        asked = QueuedResponses([Request(first + index, prompt.token_ids, *draw) for index, draw in enumerate(draws)])
        self._asked.update((request.number, asked) for request in asked.requests)
        self._dispatch.add(asked.requests, wave, after)
        return asked

    def turn(self, timeout_s: float) -> None:
        """Give waiting requests to engines, and take what they have completed, for which this waits.

        Raises:
            UserError: an engine refused a request, or too many could not start in the place of another.
            RunError: too many engines have died, or one takes too long to start.
        """
        if self.is_stranded and self._revive is not None:
            self._revive()
        self._send(self._dispatch.assign())
        self._take(timeout_s)

    @property
    def is_stranded(self) -> bool:
        """Whether no engine gets requests before `restore`."""
        return not self._dispatch.available and bool(self.started)

    @property
    def loaded(self) -> list[int]:
        """The engines that have loaded their models: those that get requests, and those that wait for `restore`."""
        return sorted([*self._dispatch.available, *self.started])

    def pause(self) -> None:
        """Wait until no engine generates. Requests that are not complete stay where they are."""
        self._take(0.0)  # also without calls, an engine may have started
        while any(self._calls):
            self._take(TURN_S)

    def tell(self, method: str, least_s: float = 0.0) -> bool:
        """Call a method of every engine that has loaded its model, while none generates, and wait for the answers.

        Engines that have died, also long before this, or do not answer in time are replaced: within `stall_s` seconds,
        or within `least_s` if that is longer.

        Returns:
            whether all engines of the run have answered, and not only those that had loaded their models.
        """
        self.pause()
        told = self._engines.subset(self.loaded).actors
        for engine in self.loaded:
            self._heard[engine] = time.monotonic() + max(0.0, least_s - self._stall_s)
            ref = getattr(self._engines.actors[engine], method).remote()
            self._calls[engine].append(ActorCall(ref, self._engines.names[engine]))
        self.pause()
        return not self._starting and self._engines.subset(self.loaded).actors == told

    def wait_for_starts(self) -> None:
        """Wait until no engine loads its model."""
        while self._starting:
            self._take(TURN_S)

    def drain(self) -> None:
        """Wait until the engines have completed all requests that they have. The others stay here."""
        while any(map(self._dispatch.running, self._dispatch.available)):
            self._send({})
            self._take(TURN_S)
        self.pause()

    def restore(self, engine: int) -> None:
        """Give requests to an engine again that has been replaced."""
        self.started.discard(engine)
        self._dispatch.restore(engine)

    def _send(self, assigned: Mapping[int, list[Request]]) -> None:
        """Keep every engine that has requests, with these new ones, supplied with calls."""
        for index, calls in enumerate(self._calls):
            self._held[index] += assigned.get(index, [])
            while len(calls) < CALLS_AHEAD and self._dispatch.running(index):
                if not calls:
                    self._heard[index] = time.monotonic()
                ref = self._engines.actors[index].advance.remote(self._held[index], self._slice_s, self.version)
                calls.append(ActorCall(ref, self._engines.names[index]))
                self._held[index] = []

    def _take(self, timeout_s: float) -> None:
        """Wait for an answer, at most this long, and record all that there are."""
        first = {calls[0].ref: index for index, calls in enumerate(self._calls) if calls}
        starting = {call.ref: index for index, call in self._starting.items()}
        refs = [*first, *starting]
        if not refs:
            return
        with heart.waiting():
            ray.wait(refs, num_returns=1, timeout=timeout_s)
            ready, silent = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            if ref in first:
                self._record(first[ref])
            else:
                self._record_start(starting[ref])
        for ref in silent:
            if ref in first:
                self._end_if_stalled(first[ref])
            else:
                self._refuse_late(starting[ref])

    def _record(self, engine: int) -> None:
        """Record the answer to the first call of an engine."""
        call = self._calls[engine].popleft()
        try:
            found: SliceResult | None = Pending.of_calls([call]).wait()[0]
        except ActorDiedError as error:
            self._lose(engine, error)
            return
        self._heard[engine] = time.monotonic()
        if found is None:  # the call is one of `tell`
            return
        self._busy_s += found.busy_s
        if found.busy_s:
            now = time.perf_counter()
            self.spans.add("gen", now - found.busy_s, now)
        for number, completion in found.completed:
            self._dispatch.complete(engine, number)
            asked = self._asked.pop(number)
            asked.found[number], asked.engines[number] = completion, engine

    def _record_start(self, engine: int) -> None:
        """Record that an engine has loaded its model in the place of another, or could not.

        Another try may succeed: GPU memory of a process that was killed is not free at once.
        """
        call = self._starting.pop(engine)
        try:
            Pending.of_calls([call]).wait()
        except (UserError, RayTaskError) as error:
            ray.kill(self._engines.actors[engine])
            self._lose(engine, error)
            return
        if self._revive is None:
            self.restore(engine)
        else:
            self.started.add(engine)

    def _lose(self, engine: int, error: Exception) -> None:
        self._calls[engine].clear()
        self._held[engine].clear()
        self.started.discard(engine)
        self.repeated += self._dispatch.lose(engine)
        self._starting[engine] = self._replace(engine, error)
        self._heard[engine] = time.monotonic()

    def _refuse_late(self, engine: int) -> None:
        """Raise RunError if an engine takes too long to load its model."""
        if time.monotonic() - self._heard[engine] > self._start_s:
            name = self._engines.names[engine]
            raise RunError(f"no answer within {self._start_s:.0f} s ({MODEL_LIMIT}) from {name}")

    def _end_if_stalled(self, engine: int) -> None:
        """End an engine that does not answer; the next look at it finds it dead."""
        silent_s = time.monotonic() - self._heard[engine]
        if silent_s > self._stall_s:
            name = self._engines.names[engine]
            print(f"warning: {name} has not answered for {silent_s:.0f} s (rollout.stall_s), and is ended", flush=True)
            ray.kill(self._engines.actors[engine])
            self._heard[engine] = time.monotonic()


def slice_of(engines: int) -> float:
    """Return the seconds of a call if there are so many engines."""
    return max(SLICE_S, engines / CALLS_PER_S)
