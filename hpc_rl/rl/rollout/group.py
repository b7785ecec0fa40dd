"""Engines in processes of their own, as one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import ray
from numpy.typing import NDArray

from hpc_rl.config.ppo import PpoConfig, engine_name, pool_of
from hpc_rl.rl.calls import ActorCall, Pending
from hpc_rl.rl.pools import Pool, Slot
from hpc_rl.rl.rollout.base import Completion, Sampling
from hpc_rl.rl.rollout.engine import Engine
from hpc_rl.rl.rollout.handles import EngineHandles, Transfer
from hpc_rl.rl.rollout.vllm import Place, environment
from hpc_rl.rl.weights.sync import Engines
from hpc_rl.rl.workers.group import WorkerGroup, concatenate, split_requests

CONTROL_TIMEOUT_S = 600
"""Longest time to fall asleep or wake: weights move between GPU and host memory."""
CLOSE_TIMEOUT_S = 30
SYNC_TIMEOUT_S = 900
"""Longest time for new weights: an engine that dies in the middle leaves the sender waiting."""


class EngineGroup:
    """One engine on each tensor_parallel_size slots of a pool.

    Args:
        share: part of its slot that an engine takes; the rest is a worker's.
        policy: the workers that send weights.
        neighbours: the workers that have the rest, if there are any.
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
        self._sleeps = share < 1 and config.trainer.device == "cuda"
        is_vllm = engine_name(config) == "vllm"
        parallel = config.rollout.tensor_parallel_size
        transfer = transfer_of(config)
        runtime = {"runtime_env": {"env_vars": environment(config.trainer.device)}} if is_vllm else {}
        remote = ray.remote(Engine)
        places = list(engine_slots(pool, parallel))
        actors, names = [], []
        for index, slots in enumerate(places):
            spread = parallel > 1 and config.trainer.device == "cuda"
            bundles = tuple(slot.bundle for slot in slots) if spread else ()
            place = Place(config.trainer.device, transfer, self._sleeps, bundles, share)
            options = slots[0].options(config.trainer.device, 0.0 if spread else share)
            actors.append(remote.options(**options, **runtime).remote(config, pool.name, index, place, logs))
            names.append(f"rollout engine {index} on node {slots[0].node.name} (log in {logs})")
        self._engines = Engines(actors, names, SYNC_TIMEOUT_S, parallel)
        self._handles = EngineHandles(self._engines, [slots[0].node.id for slots in places], transfer)
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
        return Pending.of_calls(calls).then(concatenate)

    def wait_before_workers(self, timeout_s: float) -> None:
        if self._sleeps:  # vLLM measures what is free, and wants it to stay as it is meanwhile
            self._starting.wait(timeout_s)

    def wait_until_ready(self, timeout_s: float) -> None:
        self._starting.wait(timeout_s)
        self._policy.connect_engines(self._handles).wait(timeout_s)

    def sync(self) -> None:
        self._make_room()
        self._policy.send_weights().wait(SYNC_TIMEOUT_S)

    def sleep(self) -> None:
        if self._sleeps:
            self._engines.call("sleep").wait(CONTROL_TIMEOUT_S)

    def wake(self) -> None:
        if self._sleeps:
            self._make_room()
            self._engines.call("wake").wait(CONTROL_TIMEOUT_S)

    def _make_room(self) -> None:
        if self._sleeps and self._neighbours is not None:
            self._neighbours.free_cache().wait(CONTROL_TIMEOUT_S)

    def close(self) -> None:
        self._engines.call("close").wait(CLOSE_TIMEOUT_S)


def engine_slots(pool: Pool, parallel: int) -> Iterator[list[Slot]]:
    """The slots of each engine, which are bundles of one placement group."""
    for _, slots in itertools.groupby(pool.slots, key=lambda slot: slot.group.id):
        entry = list(slots)
        yield from (entry[start : start + parallel] for start in range(0, len(entry), parallel))


def transfer_of(config: PpoConfig) -> Transfer:
    """How weights travel: CUDA IPC needs the policy's workers on the engines' own GPUs."""
    if config.trainer.device == "cpu" or engine_name(config) == "hf":
        return "host"
    return "ipc" if pool_of(config, "rollout") == pool_of(config, "actor") else "nccl"
