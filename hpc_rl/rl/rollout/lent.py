"""Engines on nodes that other jobs lend to the run (`hpc-rl lend`). They come and go while it trains.

A lent node is a node of the run's Ray with the resource LENT and without CPUs, so that Ray places nothing else there.
Each engine loads the model from its files, takes the newest weights from Ray's object store, and then gets requests.
Nobody waits for it: with old weights it gets no requests, and what a lost one had is generated again by others.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_spec
from hpc_rl.errors import UserError
from hpc_rl.formats.counted import counted
from hpc_rl.formats.offer import LENT, LentNode, Offer, refusal_file, versions_of, write_lent_nodes
from hpc_rl.rl.actors.calls import ActorCall
from hpc_rl.rl.actors.deaths import ActorLabel
from hpc_rl.rl.actors.pools import Slot, node_of, takes_lent_nodes
from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.engine_process import request_engine
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.software.ray_token import TOKEN, digest_of
from hpc_rl.system.accelerators import ray_resource
from hpc_rl.system.files import write_atomically
from hpc_rl.tracking.timeline import LENT_BY

LOOK_S = 2.0
"""Interval between looks for new nodes."""
MOST_STARTS = 3
"""Engines that are started in one place of a lent node, if they end without a complete response."""


@dataclass
class _Place:
    """An engine's place on a lent node."""

    node: str
    """Ray's id."""
    name: str
    """Ray's name of the node."""
    index: int
    """Which place of the node this is."""
    job: str
    """Slurm's id of the job that lends it."""
    label: ActorLabel
    slots: list[Slot]
    """Bundles of a placement group."""
    starts: int = 0
    engine: int | None = None
    """Index in the queue; None if no engine is there."""
    actor: Any = None
    is_loading: bool = False
    version: int = 0
    """The weights that it has, or is loading: 0 for those of the model's files."""


class LentEngines:
    """The engines of other jobs, as `RequestQueue` uses them: see its `Lenders`.

    Args:
        publish: puts the policy's weights into Ray's object store, and returns the references.
        adapters: contents of adapter_config.json if engines compute with the policy's adapters; see Placement.
        logs: the attempt's folder, which lent nodes see.
        sleeps: whether the run's own engines sleep, because they share their devices with the policy. While they are
            awake, there may be no memory to publish weights.
    """

    def __init__(
        self,
        config: PpoConfig,
        queue: RequestQueue,
        publish: Callable[[], list[Any]],
        adapters: Mapping[str, Any] | None,
        logs: Path,
        sleeps: bool = False,
    ) -> None:
        self._publishes_early = not config.rollout.staleness and not sleeps
        self.stall_s = config.rollout.lent_stall_s
        self._config, self._queue, self._publish, self._logs = config, queue, publish, logs
        self._placement = Placement(config.trainer.computes_on, "host", adapters=adapters)
        self._places: list[_Place] = []
        self._published: list[Any] | None = None
        """References to the newest weights; None: engines have them from the model's files, or wait for the next."""
        self._next_look = math.inf  # until the run is open
        self._had_engine = False
        self._lenders: dict[str, LentNode] = {}
        """By Ray's id of the node, also of those that have left. A node that comes again has another id."""
        self._earlier: Counter[str] = Counter()
        """Tokens of the engines of each node that have ended."""
        queue.lenders = self

    def open(self) -> None:
        """Tell lenders that they may come. Ray has placed what belongs to the job itself before."""
        if takes_lent_nodes(self._logs):
            package, address = engine_spec(self._config).package, ray.get_runtime_context().gcs_address
            continues, token = self._config.rollout.partial, digest_of(self._logs / TOKEN)
            Offer(address, self._config.model.path, versions_of(package), continues, token).write(self._logs)
            self._next_look = 0.0
        elif self._config.rollout.engines == "lent":
            raise UserError(
                "rollout.engines=lent: no other job can lend engines to a run that listens only to its own machine; "
                "submit it to Slurm, or use rollout.engines=own"
            )

    def look(self) -> None:
        """Start an engine in each new place, and again in each place whose engine has ended."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_S
        try:
            nodes = ray.nodes()
        except RayError:
            return  # Ray is asked again later
        alive = {node["NodeID"]: node for node in nodes if node["Alive"] and LENT in node["Resources"]}
        for node_id in alive.keys() - self._lenders.keys():
            self._add(alive[node_id])
        for place in self._places:
            if place.engine is None and place.node not in alive:
                remove_placement_group(place.slots[0].group)  # Ray would look for another node for it
        for lender in (lender for node, lender in self._lenders.items() if node not in alive and lender.left is None):
            lender.left = time.time()
            self._record()
        self._places = [place for place in self._places if place.node in alive or place.engine is not None]
        for place in self._places:
            if place.engine is None and place.starts < MOST_STARTS:
                self._start(place)
        has_engine = any(place.engine is not None for place in self._places)
        if self._had_engine and not has_engine and not self._queue.own:
            print("the run has no engine: it waits for nodes of `hpc-rl lend`", flush=True)
        self._had_engine = has_engine

    def publish(self) -> None:
        """Offer the policy's new weights. Engines get no requests until they have them. Called when none generates."""
        self._published = None  # before the new ones need memory
        if self._places or self._config.rollout.engines == "lent":
            self._published = self._publish()
        self._queue.withhold_lent()
        self._record()

    def next_call(self, engine: int) -> ActorCall | None:
        place, version = self._place(engine), self._queue.version
        if not place.is_loading:
            place.is_loading = True
            return ActorCall(place.actor.start.remote(), place.label)
        if place.version != version and self._published is not None:
            place.version = version
            return ActorCall(place.actor.take_weights.remote(self._published), place.label)
        if place.version == version:
            self._queue.restore(engine)
        return None

    def left(self, engine: int, error: Exception | None, repeated: int, continued: int) -> None:
        place = self._place(engine)
        self._earlier[place.node] += self._queue.tokens[engine]
        if self._queue.tokens[engine]:
            place.starts = 1
        place.engine = place.actor = None
        if error is None:
            reason, place.starts = "its node leaves", MOST_STARTS
        else:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].rpartition(" died: ")[2]
        again = f"; {counted(repeated, 'request')} will be repeated" if repeated else ""
        further = f"; other engines continue {counted(continued, 'response')}" if continued else ""
        print(f"{place.label.name} has ended: {reason}{further}{again}", flush=True)
        if error is not None and place.starts == MOST_STARTS:
            print(f"no further engine is started there: see {place.label.log}", flush=True)
            self._refuse(place)
        self._record()

    def _refuse(self, place: _Place) -> None:
        """Release the node of a place if no engine starts in any of its places. Its job ends with this reason."""
        places = [other for other in self._places if other.node == place.node]
        if all(other.engine is None and other.starts == MOST_STARTS for other in places):
            reason = f"its engines ended {counted(MOST_STARTS, 'time')} without a response (see {place.label.log})"
            with contextlib.suppress(OSError):  # then it stays until the run ends
                write_atomically(refusal_file(self._logs, place.name), reason)

    def _add(self, node: Mapping[str, Any]) -> None:
        _, job, rank, name = node["NodeName"].split(".", 3)
        parallel = self._config.rollout.tensor_parallel_size
        engines = int(node["Resources"][LENT]) // parallel
        self._lenders[node["NodeID"]] = LentNode(job, name, places=engines, joined=time.time())
        print(f"job {job} lends node {name}: {counted(engines, 'engine')}", flush=True)
        # Between the batches of asynchronous training, the ranks are busy: the engines wait for the next weights.
        if self._published is None and self._queue.version and self._publishes_early:
            self._published = self._publish()
        for index in range(engines):
            log = self._logs / f"node{rank}-lent{job}-engine{index}.log"
            label = ActorLabel(f"lent engine {index} on node {name} (job {job})", "engine", log, may_leave=True)
            self._places.append(
                _Place(
                    node["NodeID"], node["NodeName"], index, job, label, reserve(node, self._placement.device, parallel)
                )
            )

    def _start(self, place: _Place) -> None:
        place.starts += 1
        place.is_loading, place.version = False, 0
        place.actor = self._create(place)
        place.engine = self._queue.admit(place.actor, place.label, place.node, f"{LENT_BY}job {place.job}")
        self._queue.prepare(place.engine)
        self._record()

    def _create(self, place: _Place) -> Any:
        pool = f"lent{place.job}"
        return request_engine(self._config, pool, place.index, self._placement, place.slots, 0.0, self._logs)

    def _place(self, engine: int) -> _Place:
        return next(place for place in self._places if place.engine == engine)

    def _record(self) -> None:
        """Write what `status` shows."""
        if not self._lenders:
            return
        every = sum(self._queue.tokens)
        present: dict[str, list[int]] = {}
        for place in self._places:
            if place.engine is not None:
                present.setdefault(place.node, []).append(place.engine)
        for node, lender in self._lenders.items():
            here = present.get(node, [])
            lender.engines = len(here)
            lender.tokens = self._earlier[node] + sum(self._queue.tokens[engine] for engine in here)
            lender.share = lender.tokens / every if every else 0.0
        with contextlib.suppress(OSError):  # `status` shows the next one
            write_lent_nodes(self._logs, list(self._lenders.values()))


def reserve(node: Mapping[str, Any], device: str, count: int) -> list[Slot]:
    """Reserve devices of a lent node for an engine, as soon as they are free.

    Args:
        node: as `ray.nodes()` describes it. It has a resource with its name.
    """
    resource = ray_resource(device)
    on_device = {} if resource == "CPU" else {resource: 1}
    bundle = {**on_device, LENT: 1, node["NodeName"]: 0.001}
    group = placement_group([bundle] * count, strategy="STRICT_PACK")
    return [Slot(number, node_of(node), group, number) for number in range(count)]
