"""Generation as the driver sees it: all engines as one object.

An engine runs in the policy's processes (`InProcessRollout`), or in a separate process (`SeparateRollout`).
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ray.exceptions import RayTaskError

from hpc_rl.config.rl.pools import pool_of
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import EngineJob, engine_spec
from hpc_rl.errors import UserError
from hpc_rl.formats.peft_folder import new_config
from hpc_rl.rl.actors.calls import CALL_TIMEOUT_S, MODEL_LIMIT, ActorCall, wait_for_all
from hpc_rl.rl.actors.deaths import ActorDiedError, ActorLabel
from hpc_rl.rl.actors.pools import Pool, Slot
from hpc_rl.rl.rollout.engine import Placement
from hpc_rl.rl.rollout.engine_process import request_engine
from hpc_rl.rl.rollout.lent import LentEngines
from hpc_rl.rl.rollout.request_queue import RequestQueue
from hpc_rl.rl.weights.base import EngineActors
from hpc_rl.rl.weights.transfers import choose_transfer
from hpc_rl.software.environment import refuse_expandable_segments
from hpc_rl.training.models.lora import new_like

if TYPE_CHECKING:
    from hpc_rl.rl.workers.group import WorkerGroup

CONTROL_TIMEOUT_S = 600
"""Longest time in which engines and workers release or take GPU memory; see also rollout.stall_s."""
CLOSE_TIMEOUT_S = 30
MOST_DEATHS = 3
"""Engines that are replaced in one place. If more die there, or cannot start, the run ends."""
SYNC_TIMEOUT_S = 900
"""Longest time for a weight sync: if an engine dies during one, the sender waits for it."""


class Rollout(ABC):
    """All engines of a run. Between `sleep` and `wake` nothing is generated, and the queue is empty."""

    queue: RequestQueue
    """What the engines generate."""
    lent: LentEngines
    """Those of the engines that other jobs lend."""

    def wait_before_workers(self, timeout_s: float) -> None:  # noqa: B027  (only some have to)
        """Wait for engines that have to start before the workers load their models, and put them to sleep."""

    def wait_until_ready(self, timeout_s: float) -> None:  # noqa: B027  (only some have to)
        """Wait until all engines have started and can receive weights."""

    @abstractmethod
    def sync(self) -> None:
        """Give the engines the policy's weights. Meanwhile they do not generate. An engine that loads its model in the
        place of another does not delay the others, and gets weights with a later sync."""

    @abstractmethod
    def sleep(self) -> None:
        """Release GPU memory for training, if engines and trainer share GPUs."""

    def wake(self) -> None:  # noqa: B027  (only some have to)
        """Take the memory back, with the policy's weights. Nothing happens if the engines are awake."""

    def close(self) -> None:  # noqa: B027  (only some have to)
        """End the engines after a successful run."""


class LentRollout(Rollout):
    """No engines but those of other jobs."""

    def __init__(self, policy: WorkerGroup, config: PpoConfig, logs: Path) -> None:
        rollout, start_s = config.rollout, config.trainer.model_timeout_s
        none = EngineActors([], [], [], SYNC_TIMEOUT_S)
        self._finishes = not rollout.partial
        self.queue = RequestQueue(none, rollout.max_num_seqs, rollout.stall_s, start_s, _no_other)
        self.lent = lent_engines(config, self.queue, policy, logs, sleeps=False)

    def wait_until_ready(self, timeout_s: float) -> None:
        print("the job has no engines (rollout.engines=lent): it waits for nodes of `hpc-rl lend`", flush=True)

    def sync(self) -> None:
        if self._finishes:
            self.queue.drain()
        self.queue.pause()
        self.queue.version += 1
        self.lent.publish()

    def sleep(self) -> None:
        """Do nothing: lent engines have GPUs of their own."""


class InProcessRollout(Rollout):
    """Engines in the policy's processes. They start and end with their workers, and take memory when they generate.

    Args:
        workers: the policy's.
        frees_memory: whether `sleep` releases the engines' memory. On CPUs that costs more than it gains.
    """

    def __init__(self, workers: WorkerGroup, config: PpoConfig, frees_memory: bool, logs: Path) -> None:
        self._workers = workers
        self._frees_memory = frees_memory
        places, limit_s = config.rollout.max_num_seqs, CALL_TIMEOUT_S
        self.queue = RequestQueue(workers.engines(), places, limit_s, limit_s, _no_other)
        self.lent = lent_engines(config, self.queue, workers, logs, frees_memory)

    def sync(self) -> None:
        self._workers.sync_engine().wait()
        self.queue.version += 1
        self.lent.publish()

    def sleep(self) -> None:
        if self._frees_memory:
            self._workers.sleep_engine().wait()


def lent_engines(config: PpoConfig, queue: RequestQueue, policy: WorkerGroup, logs: Path, sleeps: bool) -> LentEngines:
    """Let other jobs lend engines to a queue. See LentEngines."""
    adapters = None if config.rollout.merge_lora or not config.model.lora.is_used else adapter_config(config)
    return LentEngines(config, queue, lambda: policy.publish_weights().wait(SYNC_TIMEOUT_S), adapters, logs, sleeps)


def _no_other(_engine: int, error: Exception) -> NoReturn:
    """Raise the error: the policy's process has died with its engine."""
    raise error


class SeparateRollout(Rollout):
    """Engines in separate processes, one on each `tensor_parallel_size` slots of a pool.

    Args:
        share: share of its slot that an engine takes; the rest belongs to a worker.
        policy: the workers that send weights.
        neighbours: the workers on the same slots, if there are any.
        logs: folder of the engines' logs.
    """

    def __init__(
        self,
        config: PpoConfig,
        pool: Pool,
        share: float,
        policy: WorkerGroup,
        neighbours: WorkerGroup | None,
        logs: Path,
    ) -> None:
        self._policy = policy
        self._neighbours = neighbours
        device = config.trainer.computes_on
        self._sleeps = share < 1 and device == "cuda"
        self._model_s = config.trainer.model_timeout_s
        self._has_weights = True
        """Whether the engines hold weights, which they lose in their sleep."""
        shared = pool_of(config, "rollout") == pool_of(config, "actor")
        adapters = None if config.rollout.merge_lora else adapter_config(config)
        # Adapters are small, and an engine reads them from host memory.
        transfers = engine_spec(config).transfers if adapters is None else ("host",)
        self._transfer = choose_transfer(transfers, device, shared)
        if self._transfer == "ipc":
            refuse_expandable_segments(os.environ)
        placement = Placement(device, self._transfer, self._sleeps, gpu_share=share, adapters=adapters)
        self._fleet = Fleet(config, pool, placement, logs)
        self._engines = self._fleet.engines
        self._starting = self._engines.call("start")
        self._reached: list[Any] = []
        """The actors that the policy's workers send weights to."""
        rollout = config.rollout
        self._finishes = not rollout.partial
        """Whether requests that an engine has begun are completed with the weights that they began with."""
        self.queue = RequestQueue(
            self._engines,
            rollout.max_num_seqs,
            rollout.stall_s,
            self._model_s,
            self._fleet.replace,
            revive=self._send_weights,
        )
        self.lent = lent_engines(config, self.queue, policy, logs, self._sleeps)

    def wait_before_workers(self, timeout_s: float) -> None:
        if self._sleeps:  # vLLM measures the free memory of the GPU, which has to stay constant meanwhile
            wait_for_all([self._starting], "rollout engines", MODEL_LIMIT, timeout_s)
            self.sleep()

    def wait_until_ready(self, timeout_s: float) -> None:
        wait_for_all([self._starting], "rollout engines", MODEL_LIMIT, timeout_s)
        self._reach(range(len(self._engines.actors)))

    def sync(self) -> None:
        self._send_weights()
        self.queue.version += 1
        self.lent.publish()

    def _send_weights(self) -> None:
        """Send weights to the engines that have loaded their models. Those that still load wait for a later sync."""
        if self._finishes:
            self.queue.drain()
        self.queue.pause()
        self._make_room()
        self.queue.tell("answer")  # one that has died without a request would get weights
        if self._sleeps:
            self.queue.wait_for_starts()
        if loaded := self.queue.loaded:
            self._reach(loaded)
            self._policy.send_weights().wait(SYNC_TIMEOUT_S)
        for engine in [*self.queue.started]:
            self.queue.restore(engine)
        self._has_weights = True

    def sleep(self) -> None:
        if self._sleeps:
            if not self._has_weights:  # another engine may start in the place of one that died in its sleep
                self._make_room()
            self.queue.wait_for_starts()  # an engine that loads needs the memory that training is about to use
            while not self.queue.tell("sleep", CONTROL_TIMEOUT_S):
                self.queue.wait_for_starts()
            self._has_weights = False

    def wake(self) -> None:
        if not self._has_weights:  # after the start, and after steps that did not change the policy
            self.sync()
        if self._sleeps:
            self._make_room()
            self.queue.tell("wake", CONTROL_TIMEOUT_S)

    def _reach(self, engines: Sequence[int]) -> None:
        """Let the policy's workers send weights to these engines and no others, which may have died."""
        chosen = self._engines.subset(engines)
        if chosen.actors != self._reached:
            self._policy.connect_engines(chosen, self._transfer).wait(self._model_s)
            self._reached = chosen.actors

    def _make_room(self) -> None:
        if self._sleeps and self._neighbours is not None:
            self._neighbours.free_cache().wait(CONTROL_TIMEOUT_S)

    def close(self) -> None:
        self._engines.subset(self.queue.loaded).call("close").wait(CLOSE_TIMEOUT_S)


def adapter_config(config: PpoConfig) -> dict[str, Any]:
    """Return the contents of adapter_config.json of the policy's adapters, for engines.

    Raises:
        UserError: the folder of model.lora.path cannot be read, or the engine cannot compute with its rank.
    """
    lora = new_like(config.model.lora)
    assert lora.rank is not None
    if problem := engine_spec(config).lora_rank_problem(lora.rank):
        raise UserError(problem)
    return new_config(config.model.path, lora.rank, lora.alpha_of_new, 0.0, lora.target_modules, None)


class Fleet:
    """One engine on each `tensor_parallel_size` slots of a pool. They load their models in `start`.

    Args:
        placement: of every engine; its bundles are chosen here.
        logs: folder of the engines' logs.
    """

    def __init__(self, config: EngineJob, pool: Pool, placement: Placement, logs: Path) -> None:
        self._config = config
        self._pool = pool.name
        self._placement = placement
        self._logs = logs
        parallel = config.rollout.tensor_parallel_size
        self._slots = list(engine_slots(pool, parallel))
        self._deaths = [0] * len(self._slots)
        self.engines = EngineActors(
            [self._create(index) for index in range(len(self._slots))],
            [
                ActorLabel(
                    f"rollout engine {index} on node {slots[0].node.name}",
                    "engine",
                    logs / f"node*-{pool.name}-engine{index}.log",
                )
                for index, slots in enumerate(self._slots)
            ],
            [slots[0].node.id for slots in self._slots],
            SYNC_TIMEOUT_S,
            parallel,
        )

    def replace(self, engine: int, error: Exception) -> ActorCall:
        """Start another engine in the place of one that has died, or did not start.

        Raises:
            Exception: the last error, if there were too many in this place.
        """
        self._deaths[engine] += 1
        if self._deaths[engine] > MOST_DEATHS:
            raise error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason, *more = lines[-1:] if isinstance(error, RayTaskError) else lines
        if not isinstance(error, ActorDiedError):
            reason = f"{self.engines.names[engine]} did not start: {reason}"
        warning = f"warning: {reason}; another engine starts in its place, and its requests are repeated"
        print("\n".join([warning, *more]), flush=True)
        self.engines.actors[engine] = actor = self._create(engine)
        return ActorCall(actor.start.remote(), self.engines.names[engine])

    def _create(self, index: int) -> Any:
        slots, share = self._slots[index], self._placement.gpu_share
        cpus = 0.0 if len(slots) > 1 and self._placement.device == "cuda" else share
        return request_engine(self._config, self._pool, index, self._placement, slots, cpus, self._logs)


def engine_slots(pool: Pool, parallel: int) -> Iterator[list[Slot]]:
    """Yield the slots of each engine, which are bundles of one placement group."""
    for _, slots in itertools.groupby(pool.slots, key=lambda slot: slot.group.id):
        entry = list(slots)
        yield from (entry[start : start + parallel] for start in range(0, len(entry), parallel))
