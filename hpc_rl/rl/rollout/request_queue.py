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
from typing import Any

import ray
from ray.exceptions import RayTaskError

from hpc_rl.data.prompts import Prompt
from hpc_rl.errors import RunError, UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rl.actors.calls import MODEL_LIMIT, ActorCall, Pending
from hpc_rl.rl.actors.deaths import ActorDiedError, ActorLabel
from hpc_rl.rl.rollout.dispatch import Dispatch
from hpc_rl.rl.rollout.engine import Completion, Request, SliceResult
from hpc_rl.rl.rollout.lenders import Lenders
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from hpc_rl.rl.rollout.respondent import TURN_S, Respondent, Samplings
from hpc_rl.rl.weights.base import EngineActors
from hpc_rl.training.perf import Spans

SLICE_S = 0.1
"""Time of a call. Within it, complete responses wait for their rewards, and new requests for their engine."""
CALLS_PER_S = 200
"""Most calls to all engines together: with many engines, the slices are longer. A call takes 1.4 ms of the driver."""
CALLS_AHEAD = 2
USUAL = 2
"""Part of the requests waits for a lent engine that loads weights, for so many times as long as it needed before."""


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
        self.lenders: Lenders | None = None
        self.own = count
        """Number of the run's own engines. Those after them are lent ones."""
        self._lent: set[int] = set()
        """The lent engines that have not ended."""
        self._loads_s: dict[int, float] = {}
        """How long each lent engine loaded weights the last time, in seconds."""
        self._leaving: set[int] = set()
        """Lent engines that give back their requests, because their nodes are about to leave."""
        self._phases = ["gen"] * count
        """Of each engine, in the timeline."""
        self.tokens = [0] * count
        """Tokens that each engine has generated, without those of `_unfinished` and `lost_tokens`."""
        self._unfinished = [0] * count
        """Tokens of the responses that each engine has begun, as far as it has told them."""
        self.lost_tokens = 0
        """Tokens of responses that are generated again."""
        self._heard = [time.monotonic()] * count
        self._asked: dict[int, QueuedResponses] = {}
        """The requests that are not complete, by number."""
        self._number = 0
        self.version = 0
        """Number of weight updates of this attempt."""
        self.repeated = 0
        """Requests that were repeated because their engine died."""
        self.busy_s = 0.0
        """Seconds that an engine has generated, on average, and those in which none was ready."""
        self.spans = Spans()
        """When engines generated: the run's own ones, and those of each other job."""

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
        if self.lenders is not None:
            self.lenders.look()
        if self.is_stranded and self._revive is not None:
            self._revive()
        if self._lent & self._starting.keys():
            self._take(0.0)  # they may have loaded weights meanwhile
        self._send(self._dispatch.assign(self._coming))
        self._take(timeout_s)

    @property
    def _coming(self) -> int:
        """Lent engines that load the newest weights, and not for longer than they usually need."""
        now, known = time.monotonic(), self._starting.keys() & self._loads_s.keys()
        return sum(now - self._heard[engine] < USUAL * self._loads_s[engine] for engine in known)

    @property
    def is_stranded(self) -> bool:
        """Whether no engine gets requests before `restore`."""
        return not self._dispatch.available and bool(self.started)

    @property
    def loaded(self) -> list[int]:
        """The run's own engines that have loaded their models: those that get requests, and those that wait for
        `restore`."""
        return sorted({*self._dispatch.available, *self.started} - self._lent)

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
            whether all engines of the run itself have answered, and not only those that had loaded their models.
        """
        self.pause()
        told = self._engines.subset(self.loaded).actors
        for engine in self.loaded:
            self._heard[engine] = time.monotonic() + max(0.0, least_s - self._stall_s)
            ref = getattr(self._engines.actors[engine], method).remote()
            self._calls[engine].append(ActorCall(ref, self._engines.names[engine]))
        self.pause()
        return not self._starting.keys() - self._lent and self._engines.subset(self.loaded).actors == told

    def wait_for_starts(self) -> None:
        """Wait until no engine of the run itself loads its model."""
        while self._starting.keys() - self._lent:
            self._take(TURN_S)

    def drain(self) -> None:
        """Wait until the engines have completed all requests that they have. The others stay here."""
        while any(map(self._dispatch.running, self._dispatch.available)):
            self._send({})
            self._take(TURN_S)
        self.pause()

    def restore(self, engine: int) -> None:
        """Give requests to an engine again that has been replaced or withheld."""
        self.started.discard(engine)
        self._dispatch.restore(engine)

    def admit(self, actor: Any, name: ActorLabel, node: str, phase: str = "gen") -> int:
        """Add a lent engine; return its index. It gets requests after the calls that `Lenders.next_call` returns.

        Args:
            node: Ray's id of its node.
            phase: its row in the timeline.
        """
        engine = self._dispatch.add_engine()
        self._phases.append(phase)
        self._engines.add(actor, name, node)
        self._calls.append(deque())
        self._held.append([])
        self._heard.append(time.monotonic())
        self.tokens.append(0)
        self._unfinished.append(0)
        self._lent.add(engine)
        self._slice_s = slice_of(len(self._dispatch.present))
        return engine

    def prepare(self, engine: int) -> None:
        """Let a lent engine do what it has to before it gets requests."""
        assert self.lenders is not None
        call = self.lenders.next_call(engine)
        if call is not None:
            self._starting[engine] = call
            self._heard[engine] = time.monotonic()

    def withhold_lent(self) -> None:
        """Give lent engines no more requests before they have the newest weights. None generates at this time."""
        for engine in self._lent:
            self._dispatch.withhold(engine)
            if engine not in self._starting:
                self.prepare(engine)

    def _send(self, assigned: Mapping[int, list[Request]]) -> None:
        """Keep every engine that has requests, with these new ones, supplied with calls."""
        for index in self._dispatch.present:
            calls = self._calls[index]
            self._held[index] += assigned.get(index, [])
            if index in self._starting or index in self._leaving:
                continue
            while len(calls) < CALLS_AHEAD and self._dispatch.running(index):
                if not calls:
                    self._heard[index] = time.monotonic()
                ref = self._engines.actors[index].advance.remote(self._held[index], self._slice_s, self.version)
                calls.append(ActorCall(ref, self._engines.names[index]))
                self._held[index] = []

    def _take(self, timeout_s: float) -> None:
        """Wait for an answer, at most this long, and record all that there are."""
        first = {self._calls[index][0].ref: index for index in self._dispatch.present if self._calls[index]}
        starting = {call.ref: index for index, call in self._starting.items()}
        refs, began = [*first, *starting], time.monotonic()
        with heart.waiting():
            if refs:
                ray.wait(refs, num_returns=1, timeout=timeout_s)
            elif not self._dispatch.present:  # all engines are lent ones, and none is there
                time.sleep(min(timeout_s, TURN_S))
        if not self._dispatch.available:  # no engine is idle: they load, or there is none
            self.busy_s += time.monotonic() - began
        ready, silent = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
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
        except (UserError, RayTaskError) as error:
            # What goes wrong there does not end the run. Whether a refusal is the user's mistake, own engines show.
            if engine in self._lent and (self.own or isinstance(error, (RunError, RayTaskError))):
                ray.kill(self._engines.actors[engine])
            elif not isinstance(error, ActorDiedError):
                raise
            self._lose(engine, error)
            return
        self._heard[engine] = time.monotonic()
        if found is None:  # the call is one of `tell`
            return
        self.busy_s += found.busy_s / len(self._dispatch.present)
        if found.busy_s:
            now = time.perf_counter()
            self.spans.add(self._phases[engine], now - found.busy_s, now)
        for number, completion in found.completed:
            self._dispatch.complete(engine, number)
            asked = self._asked.pop(number)
            asked.found[number], asked.engines[number] = asked.whole(number, completion), engine
            self.tokens[engine] += completion.sampled
        if found.begun is not None:
            ray.kill(self._engines.actors[engine])
            self._lose(engine, None, found.begun)
            return
        self._unfinished[engine] = found.unfinished
        if found.leaves and engine not in self._leaving:
            self._leaving.add(engine)
            self._dispatch.withhold(engine)
            ref = self._engines.actors[engine].withdraw.remote()
            self._calls[engine].append(ActorCall(ref, self._engines.names[engine]))

    def _record_start(self, engine: int) -> None:
        """Record that an engine has loaded its model in the place of another, or could not.

        Another try may succeed: GPU memory of a process that was killed is not free at once.
        """
        call = self._starting.pop(engine)
        try:
            (seconds,) = Pending.of_calls([call]).wait()
        except (UserError, RayTaskError) as error:
            ray.kill(self._engines.actors[engine])
            self._lose(engine, error)
            return
        if engine in self._lent:
            if isinstance(seconds, float):
                self._loads_s[engine] = seconds
            self.prepare(engine)
        elif self._revive is None:
            self.restore(engine)
        else:
            self.started.add(engine)

    def _lose(self, engine: int, error: Exception | None, begun: Mapping[int, Completion] | None = None) -> None:
        """Let other engines have the requests of one that has ended.

        Args:
            error: None if the node of a lent engine leaves.
            begun: the tokens that it has given back.
        """
        self._calls[engine].clear()
        self._held[engine].clear()
        self._starting.pop(engine, None)
        self.started.discard(engine)
        self._leaving.discard(engine)
        self._loads_s.pop(engine, None)
        kept = begun or {}
        for number, part in kept.items():
            asked = self._asked[number]
            asked.begun[number] = asked.whole(number, part)
            self.tokens[engine] += part.sampled
        repeated = self._dispatch.lose(engine, engine in self._lent, kept) - len(kept)
        self.repeated += repeated
        self.lost_tokens += self._unfinished[engine] if begun is None else 0
        self._unfinished[engine] = 0
        if engine in self._lent:
            assert self.lenders is not None
            self._lent.remove(engine)
            self.lenders.left(engine, error, repeated, len(kept))
            return
        assert error is not None
        self._starting[engine] = self._replace(engine, error)
        self._heard[engine] = time.monotonic()

    @property
    def _lent_limit(self) -> tuple[float, str]:
        """How long a lent engine may be silent, and the option."""
        assert self.lenders is not None
        return self.lenders.stall_s, "rollout.lent_stall_s"

    def _refuse_late(self, engine: int) -> None:
        """Raise RunError if an engine takes too long to load its model. A lent one is ended."""
        limit_s, option = self._start_s, MODEL_LIMIT
        if engine in self._lent and self._dispatch.running(engine):  # others could have its requests
            stall_s, option = self._lent_limit
            limit_s = max(stall_s, USUAL * self._loads_s.get(engine, 0.0))
        if time.monotonic() - self._heard[engine] <= limit_s:
            return
        late = f"no answer within {limit_s:.0f} s ({option})"
        if engine not in self._lent:
            raise RunError(f"{late} from {self._engines.names[engine]}")
        ray.kill(self._engines.actors[engine])
        self._lose(engine, RunError(late))

    def _end_if_stalled(self, engine: int) -> None:
        """End an engine that does not answer; the next look at it finds it dead."""
        silent_s, name = time.monotonic() - self._heard[engine], self._engines.names[engine]
        limit_s, option = self._lent_limit if engine in self._lent else (self._stall_s, "rollout.stall_s")
        if silent_s > limit_s:
            print(f"warning: {name} has not answered for {silent_s:.0f} s ({option}), and is ended", flush=True)
            ray.kill(self._engines.actors[engine])
            self._heard[engine] = time.monotonic()


def slice_of(engines: int) -> float:
    """Return the seconds of a call if there are so many engines."""
    return max(SLICE_S, engines / CALLS_PER_S)
