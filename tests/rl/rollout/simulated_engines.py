"""Ray, its engines and the policy's workers as state machines: a call that breaks a rule of theirs raises.

The order of calls is free, as far as the rules allow it. Versions of weights are numbers, GPUs are sets of what holds
their memory, and time is a number.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.exceptions import RayActorError

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.data.prompts import Prompt
from hpc_rl.rl.actors.calls import Pending
from hpc_rl.rl.actors.pools import Pool
from hpc_rl.rl.rollout.engine import Request, Sampling, SliceResult
from hpc_rl.rl.rollout.queued_responses import QueuedResponses
from hpc_rl.rl.rollout.rollout import SeparateRollout
from hpc_rl.rl.weights.base import EngineActors

SLICES = 4
"""Calls of `advance` that complete a request."""
MOST_LOOKS = 10_000
AWAKE = frozenset({"weights", "cache"})
"""What an engine holds on its GPU. A sync wakes only the weights."""


@dataclass(eq=False)
class EngineCall:
    """Stands for Ray's reference. A call takes effect when its result is taken; but see `EngineActor.begin`."""

    engine: EngineActor
    method: str
    arguments: tuple[Any, ...]
    ends_at: float

    def is_ready(self) -> bool:
        return bool(self.engine.end) or self.engine.ray.now >= max(self.ends_at, self.engine.loaded_at)


class Response(list[int | None]):
    """The versions of the weights that generated each slice."""

    sampled = SLICES


class EngineActor:
    """A process with an engine, and Ray's handle of it. Its GPU is its own, or also that of a worker."""

    def __init__(self, ray: Cluster, options: dict[str, Any], arguments: tuple[Any, ...]) -> None:
        self.ray, self.number, self.options, self.arguments = ray, len(ray.engines), options, arguments
        self.place, self.placement = arguments[2:4]
        self.gpu = ray.gpus[self.place]
        self.weights: int | None = 0
        """Their version; None while they are lost. The model's files have version 0."""
        self.requests: dict[int, list[int | None]] = {}
        """By number: the versions that generated the slices so far."""
        self.generating = 0
        """Calls of `advance` whose results are not taken."""
        self.takes_s = {"start": ray.load_s}
        self.loaded_at, self.end = math.inf, ""
        ray.engines.append(self)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self.begin, method))

    @property
    def state(self) -> str:
        if self.end or self.ray.now < self.loaded_at:
            return self.end or "loading"
        return "ready" if self.gpu >= AWAKE else "asleep"

    def begin(self, method: str, *arguments: Any) -> EngineCall:
        ends_at = self.ray.now + self.takes_s.get(method, 0.0)
        if method == "start":
            assert not self.gpu, "an engine that starts needs the whole GPU"
            self.take(AWAKE)
            self.loaded_at = ends_at
        self.generating += method == "advance"
        return EngineCall(self, method, arguments, ends_at)

    def answer_to(self, call: EngineCall) -> SliceResult | None:
        if self.end:
            raise RayActorError(error_msg="killed")
        if call.method == "advance":
            return self.generate(*call.arguments)
        if call.method == "sleep":
            self.gpu -= AWAKE
            self.weights = None
        elif call.method == "wake":
            self.take(AWAKE)
        elif call.method == "close":
            self.die("closed")
        return None

    def generate(self, requests: Sequence[Request], slice_s: float, _version: int) -> SliceResult:
        self.generating -= 1
        assert self.state == "ready" and self.weights == self.ray.sent, f"{self.state}, with weights {self.weights}"
        self.requests |= {request.number: [] for request in requests}
        for versions in self.requests.values():
            versions.append(self.weights)
        complete = [number for number, versions in self.requests.items() if len(versions) == SLICES]
        completed: list[Any] = [(number, Response(self.requests.pop(number))) for number in complete]
        return SliceResult(completed, slice_s)

    def receive(self, version: int | None) -> None:
        """Take part in a sync, or in the connection before it, which has no version."""
        assert self.state in ("ready", "asleep"), f"the sender waits for engine {self.number}, which is {self.state}"
        if version is not None:
            self.take({"weights"})
            self.weights = version

    def take(self, parts: Set[str]) -> None:
        assert "worker" not in self.gpu or self.gpu >= parts, "the worker on this GPU holds its memory"
        self.gpu |= parts

    def die(self, end: str = "dead") -> None:
        self.end = end
        self.gpu -= AWAKE


class Cluster:
    """Stands for Ray. Time passes only while a wait has nothing to return."""

    def __init__(self) -> None:
        self.now, self.load_s, self.looks = 0.0, 100.0, 0
        self.engines: list[EngineActor] = []
        """All that were ever requested."""
        self.gpus: defaultdict[int, set[str]] = defaultdict(set)
        """What holds memory of each: parts of an engine, and the cache of a worker."""
        self.sent = 0
        """The version that was sent last."""

    def remote(self, _kind: type) -> Any:
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *args: EngineActor(self, options, args))
        )

    def wait(self, refs: Sequence[EngineCall], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.looks += 1
        assert self.looks < MOST_LOOKS, "the driver looks again and again, and does not wait"
        ready = [ref for ref in refs if ref.is_ready()][:num_returns]
        self.now += 0.0 if ready else timeout
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: EngineCall) -> Any:
        return ref.engine.answer_to(ref)

    def nodes(self) -> list[Any]:
        return []

    @property
    def places(self) -> list[tuple[int, str, int | None]]:
        """Number, state and weights of the latest engine in each place."""
        latest = {engine.place: engine for engine in self.engines}
        return [(engine.number, engine.state, engine.weights) for _, engine in sorted(latest.items())]


class PolicyWorkers:
    """Stands for the policy's workers. What they are asked takes effect when the result is taken."""

    def __init__(self, ray: Cluster, shared: Sequence[set[str]]) -> None:
        self.ray, self.shared = ray, shared
        self.version, self.transfer = 0, ""
        self.engines = EngineActors([], [], [], 1.0)
        """Those to which they are connected."""
        self.connections = 0

    def train(self, version: int) -> None:
        """Change the weights. torch's cache keeps the memory in which they were computed."""
        assert not any(gpu & AWAKE for gpu in self.shared), "an engine on this GPU holds its memory"
        self.version = version
        self._fill_cache()

    def free_cache(self) -> Pending[None]:
        return Pending(lambda _: [gpu.discard("worker") for gpu in self.shared].clear())

    def connect_engines(self, engines: EngineActors, transfer: str) -> Pending[None]:
        return Pending(lambda _: self._connect(engines, transfer))

    def send_weights(self) -> Pending[None]:
        return Pending(lambda _: self._send())

    def _connect(self, engines: EngineActors, transfer: str) -> None:
        assert engines.actors, "a sender without an engine"
        for engine in engines.actors:
            engine.receive(None)
        self.engines, self.transfer, self.connections = engines, transfer, self.connections + 1

    def _send(self) -> None:
        assert not any(engine.generating and not engine.end for engine in self.ray.engines), "an engine generates"
        for engine in self.engines.actors:
            engine.receive(self.version)
        self.ray.sent = self.version
        self._fill_cache()  # they were gathered

    def _fill_cache(self) -> None:
        for gpu in self.shared:
            gpu.add("worker")


class Setting:
    """A rollout, and the policy's workers beside it or on the same GPUs."""

    def __init__(self, ray: Cluster, config: PpoConfig, engines: Pool, share: float) -> None:
        self.workers = PolicyWorkers(ray, [ray.gpus[slot.rank] for slot in engines.slots] if share < 1 else [])
        workers: Any = self.workers
        self.rollout = SeparateRollout(config, engines, share, workers, workers if share < 1 else None, Path("/logs"))
        self.queue = self.rollout.queue

    def ask(self) -> QueuedResponses:
        return self.queue.ask(Prompt(np.zeros(3, np.int32), None, {}, ""), [(0, Sampling(4))])

    @property
    def available(self) -> list[int]:
        """The places whose engines get requests."""
        return self.queue._dispatch.available

    @property
    def connected(self) -> list[int]:
        """The numbers of the engines that get weights."""
        return [engine.number for engine in self.workers.engines.actors]
