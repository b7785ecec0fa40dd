"""Generation as the driver sees it: all engines as one object.

An engine runs in the policy's processes (`InProcessRollout`), or in a separate process (`SeparateRollout`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray

from hpc_rl.config.pools import pool_of
from hpc_rl.config.ppo import PpoConfig
from hpc_rl.config.rollout import EngineJob, engine_spec
from hpc_rl.errors import UserError
from hpc_rl.host.environment import refuse_expandable_segments
from hpc_rl.host.peft_folder import new_config
from hpc_rl.rl.calls import MODEL_LIMIT, ActorCall, Pending, wait_for_all
from hpc_rl.rl.fates import Actor
from hpc_rl.rl.pools import Pool, Slot
from hpc_rl.rl.rollout.engine import Completion, Placement, Sampling
from hpc_rl.rl.rollout.engine_process import EngineProcess
from hpc_rl.rl.weights.base import EngineActors
from hpc_rl.rl.weights.transfers import choose_transfer
from hpc_rl.training.models.lora import new_like

CONTROL_TIMEOUT_S = 600
"""Longest time for `sleep` or `wake`, which release and allocate GPU memory."""
CLOSE_TIMEOUT_S = 30
SYNC_TIMEOUT_S = 900
"""Longest time for a weight sync: if an engine dies during one, the sender waits for it."""


class PolicyWorkers(Protocol):
    """The training workers of a pool (`hpc_rl.rl.workers.group.WorkerGroup`), as far as generation needs them."""

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> Pending[list[Completion]]: ...

    def sync_engine(self) -> Pending[None]: ...

    def sleep_engine(self) -> Pending[None]: ...

    def connect_engines(self, engines: EngineActors, transfer: str) -> Pending[None]: ...

    def send_weights(self) -> Pending[None]: ...

    def free_cache(self) -> Pending[None]: ...


class Rollout(Protocol):
    """All engines of a run."""

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> Pending[list[Completion]]:
        """Start generating one completion for each prompt, in order; see RolloutEngine."""
        ...

    def wait_before_workers(self, timeout_s: float) -> None:
        """Wait for engines that have to start before the workers load their models, and put them to sleep."""
        ...

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until all engines have started and can receive weights."""
        ...

    def sync(self) -> None:
        """Give the engines the policy's weights."""
        ...

    def sleep(self) -> None:
        """Release GPU memory for training, if engines and trainer share GPUs."""
        ...

    def wake(self) -> None:
        """Take the memory back, with the policy's weights. Nothing happens if the engines are awake."""
        ...

    def close(self) -> None:
        """End the engines after a successful run."""
        ...


class InProcessRollout:
    """Engines in the policy's processes.

    Args:
        workers: the policy's.
        frees_memory: whether `sleep` releases the engines' memory. On CPUs that costs more than it gains.
    """

    def __init__(self, workers: PolicyWorkers, frees_memory: bool) -> None:
        self._workers = workers
        self._frees_memory = frees_memory

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> Pending[list[Completion]]:
        return self._workers.generate(prompts, seeds, sampling)

    def wait_before_workers(self, timeout_s: float) -> None:
        """Return at once: the engines start with their workers."""

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return at once: the engines start with their workers."""

    def sync(self) -> None:
        self._workers.sync_engine().wait()

    def sleep(self) -> None:
        if self._frees_memory:
            self._workers.sleep_engine().wait()

    def wake(self) -> None:
        """Do nothing: an engine takes memory when it generates."""

    def close(self) -> None:
        """Do nothing: the engines end with their workers."""


class SeparateRollout:
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
        policy: PolicyWorkers,
        neighbours: PolicyWorkers | None,
        logs: Path,
    ) -> None:
        self._policy = policy
        self._neighbours = neighbours
        device = config.trainer.computes_on
        self._sleeps = share < 1 and device == "cuda"
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
        self._engines = create_engines(config, pool, placement, logs)
        self._starting = self._engines.call("start")

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> Pending[list[Completion]]:
        engines = self._engines
        parts = split_requests(prompts, seeds, sampling, len(engines.actors))
        calls = [
            ActorCall(actor.generate.remote(*part), name)
            for actor, part, name in zip(engines.actors, parts, engines.names, strict=True)
        ]
        return Pending.of_calls(calls).then(joined)

    def wait_before_workers(self, timeout_s: float) -> None:
        if self._sleeps:  # vLLM measures the free memory of the GPU, which has to stay constant meanwhile
            wait_for_all([self._starting], "rollout engines", MODEL_LIMIT, timeout_s)
            self.sleep()

    def wait_until_ready(self, timeout_s: float) -> None:
        wait_for_all([self._starting], "rollout engines", MODEL_LIMIT, timeout_s)
        self._policy.connect_engines(self._engines, self._transfer).wait(timeout_s)

    def sync(self) -> None:
        self._make_room()
        self._policy.send_weights().wait(SYNC_TIMEOUT_S)
        self._has_weights = True

    def sleep(self) -> None:
        if self._sleeps:
            self._engines.call("sleep").wait(CONTROL_TIMEOUT_S)
            self._has_weights = False

    def wake(self) -> None:
        if not self._has_weights:  # after the start, and after steps that did not change the policy
            self.sync()
        if self._sleeps:
            self._make_room()
            self._engines.call("wake").wait(CONTROL_TIMEOUT_S)

    def _make_room(self) -> None:
        if self._sleeps and self._neighbours is not None:
            self._neighbours.free_cache().wait(CONTROL_TIMEOUT_S)

    def close(self) -> None:
        self._engines.call("close").wait(CLOSE_TIMEOUT_S)


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


def create_engines(config: EngineJob, pool: Pool, placement: Placement, logs: Path) -> EngineActors:
    """Create one engine on each `tensor_parallel_size` slots of a pool. They load their models in `start`.

    Args:
        placement: of every engine; its bundles are chosen here.
        logs: folder of the engines' logs.
    """
    spec, device, share = engine_spec(config), placement.device, placement.gpu_share
    parallel = config.rollout.tensor_parallel_size
    variables = spec.process_environment(device)
    runtime = {"runtime_env": {"env_vars": variables}} if variables else {}
    remote = ray.remote(EngineProcess)
    actors, names, nodes = [], [], []
    for index, slots in enumerate(engine_slots(pool, parallel)):
        spread = parallel > 1 and device == "cuda"
        own = replace(placement, bundles=tuple(slot.bundle for slot in slots) if spread else ())
        options = slots[0].options(device, 0.0 if spread else share)
        actors.append(remote.options(**options, **runtime).remote(config, pool.name, index, own, logs))
        log = logs / f"node*-{pool.name}-engine{index}.log"
        names.append(Actor(f"rollout engine {index} on node {slots[0].node.name}", "engine", log))
        nodes.append(slots[0].node.id)
    return EngineActors(actors, names, nodes, SYNC_TIMEOUT_S, parallel)


def engine_slots(pool: Pool, parallel: int) -> Iterator[list[Slot]]:
    """Yield the slots of each engine, which are bundles of one placement group."""
    for _, slots in itertools.groupby(pool.slots, key=lambda slot: slot.group.id):
        entry = list(slots)
        yield from (entry[start : start + parallel] for start in range(0, len(entry), parallel))


def split_requests(
    prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling, engines: int
) -> Iterator[tuple[Sequence[NDArray[np.int32]], Sequence[int], Sampling]]:
    """Yield contiguous parts of about equal size. Equal prompts are adjacent, so that most of them share an engine."""
    edges = np.linspace(0, len(prompts), engines + 1).round().astype(int)
    for start, end in itertools.pairwise(edges):
        yield prompts[start:end], seeds[start:end], sampling


def joined(parts: list[list[Completion]]) -> list[Completion]:
    """Join lists in their order."""
    return [item for part in parts for item in part]
