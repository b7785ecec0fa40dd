"""Ray on a virtual clock, with engines on nodes that join and leave, behind the real `RequestQueue` and `LentEngines`.

    with Ray(...) as ray:          # takes the place of Ray and of the clock in the modules of the driver
        queue = RequestQueue(...)
        queue.turn(0.5)            # virtual time passes

A call to an engine has its result when it is made, because the times at which nodes leave are known: only the driver
learns it later. Weights spread over the nodes as `Copies` describes.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from ray.exceptions import RayActorError

from benchmarks.virtual_engines import StepSeconds, VirtualEngine
from hpc_rl.formats.offer import LENT
from hpc_rl.rl.rollout.engine import Completion, Request, SliceResult, Span
from hpc_rl.rl.rollout.request_queue import slice_of

MODULES = ("actors.calls", "actors.deaths", "rollout.request_queue", "rollout.lent", "rollout.engine_process")
"""Those of `hpc_rl.rl` that use Ray or a clock."""


class Stay(NamedTuple):
    """The time in which a node is lent."""

    begin: float
    end: float
    """math.inf if it never leaves."""


def stays(slots: int, life_s: float, gap_s: float, until: float, random: np.random.Generator) -> list[Stay]:
    """Draw when nodes come and go, as at any time of a long run: lives and gaps are exponential.

    Args:
        slots: nodes that there would be without gaps.
        life_s: mean time of a stay; math.inf if nobody leaves.
        gap_s: mean time until another node takes its place.
    """
    if math.isinf(life_s):
        return [Stay(0.0, math.inf)] * slots
    found = []
    for _ in range(slots):
        now = 0.0 if random.random() < life_s / (life_s + gap_s) else random.exponential(gap_s)
        while now < until:
            end = now + random.exponential(life_s)
            found.append(Stay(now, end))
            now = end + random.exponential(gap_s)
    return sorted(found)


class Copies:
    """Copies of the same weights. A node that has one serves one other at a time.

    Args:
        now: when the first copy is there.
        seconds: of a copy from node to node.
        one_source: whether only the node with the first copy serves others.
    """

    def __init__(self, now: float, seconds: float, one_source: bool = False) -> None:
        self._seconds, self._one_source = seconds, one_source
        self._sources = [(now, -1, math.inf)]
        """A heap: when a copy's node is free, its number, and when it leaves."""
        self._there: dict[int, float] = {}

    def reach(self, node: int, now: float, leaves: float) -> float:
        """Return when a node that asks now, and leaves later, has its copy."""
        if node in self._there:
            return max(now, self._there[node])
        while True:
            free, source, end = heapq.heappop(self._sources)
            done = max(now, free) + self._seconds
            if done <= end:
                break
        heapq.heappush(self._sources, (done, source, end))
        if done <= leaves and not self._one_source:
            heapq.heappush(self._sources, (done, node, leaves))
        self._there[node] = done
        return done


@dataclass(frozen=True)
class Machine:
    """How long everything takes."""

    places: int
    """Responses that an engine computes at a time."""
    step_s: StepSeconds
    recompute_s: float
    """Seconds to compute a token again."""
    load_s: float
    """Seconds until an engine has loaded its model."""
    copy_s: float
    """Seconds of a copy of the weights from the node's memory to a GPU."""
    notice_s: float
    """Seconds until Ray reports that a node has left."""
    engines_per_node: int


@dataclass(eq=False)
class Ref:
    """Ray's reference to the result of a call."""

    ready_at: float
    value: Any = None
    dead: bool = False


@dataclass(eq=False)
class Node:
    number: int
    stay: Stay
    actors: list[Actor] = field(default_factory=list)


class Actor:
    """The process of an engine, and Ray's handle of it."""

    def __init__(self, ray: Ray, node: Node) -> None:
        self.ray, self.node = ray, node
        self.end = node.stay.end
        self.engine = VirtualEngine(ray.machine.places, ray.machine.step_s)
        self.free_at = self.loaded_at = ray.now
        self.first_at = math.inf
        """When it got its first request."""
        self.syncs: list[tuple[float, float]] = []
        """When it was told to take weights, and when it had them."""
        self._lengths: dict[int, int] = {}
        """Tokens of the response to each request that it has."""
        self._moved: dict[int, float] = {}
        """Those that another engine has computed."""
        self._lost = False
        node.actors.append(self)

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self), f"do_{name}", None)
        if method is None:
            raise AttributeError(name)
        return SimpleNamespace(remote=functools.partial(self._call, method))

    def _call(self, method: Callable[..., tuple[float, Any]], *arguments: Any) -> Ref:
        began = time.thread_time()
        ref = self._begin(method, *arguments)
        self.ray.away_s += time.thread_time() - began
        return ref

    def _begin(self, method: Callable[..., tuple[float, Any]], *arguments: Any) -> Ref:
        begin = max(self.ray.now, self.free_at)
        if begin >= self.end:
            self._lose(self.engine.progress(self.engine.steps) if self.ray.moves else {}, [])
            return Ref(max(self.ray.now, self.end + self.ray.machine.notice_s), dead=True)
        self.free_at, value = method(self, begin, *arguments)
        if self.free_at > self.end:
            return Ref(self.end + self.ray.machine.notice_s, dead=True)
        return Ref(self.free_at, value)

    def do_start(self, begin: float) -> tuple[float, Any]:
        self.loaded_at = begin + self.ray.machine.load_s
        return self.loaded_at, None

    def do_answer(self, begin: float) -> tuple[float, Any]:
        return begin, None

    def do_take_weights(self, begin: float, published: Sequence[Any]) -> tuple[float, Any]:
        ((version, copies),) = published
        end = copies.reach(self.node.number, begin, self.end) + self.ray.machine.copy_s
        self.change_weights(begin, end - begin, version)
        self.syncs.append((begin, end))
        return end, float(end - begin)

    def change_weights(self, begin: float, seconds: float, version: int) -> None:
        """Take weights, and then compute the responses so far again."""
        self.engine.skip(begin)
        self.engine.change_weights(begin, seconds, version, self.ray.machine.recompute_s)

    def do_advance(
        self, begin: float, requests: Sequence[Request], slice_s: float, _version: int
    ) -> tuple[float, SliceResult | None]:
        answered, busy_s, last = self.engine.steps, self.engine.busy_s, begin
        self.engine.skip(begin)
        self._add(begin, requests)
        end = min(begin + slice_s, self.end)
        leaves = begin + slice_s > self.end
        known = self.engine.progress(answered) if leaves and self.ray.moves else {}
        completed: list[tuple[int, tuple[Span, ...]]] = []
        while (due := self.engine.due) <= end:
            completed += self.engine.advance(due)
            last = due
        if math.isinf(due) and not leaves:  # it has nothing left
            end = last
        self.engine.advance(end)
        if leaves:
            self._lose(known, [number for number, _ in completed])
            return math.inf, None
        return end, SliceResult(
            [(number, self._completion(number, spans)) for number, spans in completed], self.engine.busy_s - busy_s
        )

    def _add(self, begin: float, requests: Sequence[Request]) -> None:
        if not requests:
            return
        self.first_at = min(self.first_at, begin)
        rows = []
        for number in (request.number for request in requests):
            self._lengths[number], self._moved[number] = self.ray.length(number), self.ray.moved.pop(number, 0.0)
            rows.append((number, max(1, round(self._lengths[number] - self._moved[number]))))
        again = sum(self._moved[number] for number, _ in rows)
        self.engine.skip(begin, again * self.ray.machine.recompute_s)
        self.engine.add(begin, rows)

    def _completion(self, number: int, spans: tuple[Span, ...]) -> Completion:
        tokens = self._lengths.pop(number)
        self._moved.pop(number)
        self.ray.useful += tokens
        self.ray.completed += 1
        return Completion(self.ray.ids[:tokens], self.ray.logprobs[:tokens], True, spans)

    def _lose(self, known: Mapping[int, float], completed: Sequence[int]) -> None:
        """Count what is lost with it.

        Args:
            known: tokens of each response that the driver has received, and which others need not generate.
            completed: responses whose completion the driver does not hear of.
        """
        if self._lost:
            return
        self._lost, ray = True, self.ray
        generated = sum(self.engine.progress(self.engine.steps).values())
        generated += sum(self._lengths[number] - self._moved[number] for number in completed)
        ray.lost += generated - sum(known.values())
        ray.repeated += len(self._lengths)
        if ray.moves:
            ray.moved.update((number, self._moved[number] + known.get(number, 0.0)) for number in self._lengths)


class Ray:
    """Stands for the module.

    Args:
        lengths: tokens of the responses in the order of the requests; the first follows the last.
        lent: when nodes are lent.
        moves: whether a response continues elsewhere after the tokens that the last complete call had.
    """

    def __init__(self, machine: Machine, lengths: Sequence[int], lent: Sequence[Stay], moves: bool = False) -> None:
        self.machine, self.moves, self.now = machine, moves, 0.0
        self.useful = self.lost = 0.0
        """Tokens of responses that the driver got, and tokens that nobody got."""
        self.completed = self.repeated = 0
        """Responses that the driver got, and requests that were lost."""
        self.moved: dict[int, float] = {}
        self.nodes_lent = [Node(number, stay) for number, stay in enumerate(lent)]
        self.ids, self.logprobs = np.zeros(max(lengths), np.int32), np.zeros(max(lengths), np.float32)
        self._lengths, self._coming = lengths, 0
        self._present: list[Node] = []
        self.away_s = 0.0
        self._stack = contextlib.ExitStack()

    def length(self, number: int) -> int:
        """Return the tokens of the response to a request. A response depends on its seed only."""
        return self._lengths[number % len(self._lengths)]

    def __enter__(self) -> Ray:
        clock = SimpleNamespace(monotonic=self._clock, perf_counter=self._clock, time=self._clock, sleep=self.sleep)
        for name in MODULES:
            self._stack.enter_context(mock.patch(f"hpc_rl.rl.{name}.ray", self))
            if name != "actors.deaths":
                self._stack.enter_context(mock.patch(f"hpc_rl.rl.{name}.time", clock))
        self._stack.enter_context(mock.patch("hpc_rl.rl.rollout.lent.reserve", _reserve))
        self._stack.enter_context(mock.patch("hpc_rl.rl.rollout.lent.remove_placement_group", lambda _group: None))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _clock(self) -> float:
        return self.now

    @contextlib.contextmanager
    def driver(self, into: list[float]) -> Iterator[None]:
        """Append the processor time of the block, without that of the engines and of Ray."""
        began, away_s = time.thread_time(), self.away_s
        yield
        into.append(time.thread_time() - began - (self.away_s - away_s))

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def own_engines(self, count: int) -> list[Actor]:
        """Return engines that have loaded their model, and never leave."""
        return [Actor(self, Node(-2, Stay(0.0, math.inf))) for _ in range(count)]

    # What the driver uses of the module:

    def nodes(self) -> list[dict[str, Any]]:
        while self._coming < len(self.nodes_lent) and self.nodes_lent[self._coming].stay.begin <= self.now:
            self._present.append(self.nodes_lent[self._coming])
            self._coming += 1
        notice_s = self.machine.notice_s
        self._present = [node for node in self._present if node.stay.end + notice_s > self.now]
        resources = {LENT: float(self.machine.engines_per_node)}
        return [
            {
                "NodeID": f"{node.number:056x}",
                "NodeName": f"lent.{node.number}.0.node{node.number}",
                "Resources": resources,
                "Alive": True,
            }
            for node in self._present
        ]

    def remote(self, _kind: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, scheduling_strategy: Any, **_: Any) -> Any:
        node = self.nodes_lent[int(scheduling_strategy.node_id, 16)]
        return SimpleNamespace(remote=lambda *_: Actor(self, node))

    def wait(self, refs: Sequence[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        """Let time pass until there is an answer. A turn of the driver takes a slice, as if it were busy."""
        began = time.thread_time()
        event = min(ref.ready_at for ref in refs)
        if event > self.now and timeout > 0:
            self.now = max(min(event, self.now + timeout), self.now + slice_of(len(refs)))
        ready = [ref for ref in refs if ref.ready_at <= self.now]
        left = [ref for ref in refs if ref.ready_at > self.now]
        self.away_s += time.thread_time() - began
        return ready, left

    def get(self, ref: Ref) -> Any:
        if ref.dead:
            raise RayActorError(error_msg="the node has left")
        return ref.value

    def kill(self, actor: Actor) -> None:
        actor.end = min(actor.end, self.now)


def _reserve(node: Mapping[str, Any], _device: str, _count: int) -> list[Any]:
    """Return what stands for a bundle on a node."""
    strategy = {"scheduling_strategy": SimpleNamespace(node_id=node["NodeID"])}
    return [SimpleNamespace(group=None, bundle=0, options=lambda *_: strategy)]


def overlap(begin: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """Return how much of the time from begin to end is in these spans."""
    return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in spans)
