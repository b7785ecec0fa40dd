"""The process of an engine that does not run in the policy's processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from hpc_rl.config.rl.rollout import EngineJob, engine_spec
from hpc_rl.formats.offer import LEAVING
from hpc_rl.liveness.heartbeat import beats_in_calls, heart
from hpc_rl.rl.actors import process
from hpc_rl.rl.actors.pools import Slot
from hpc_rl.rl.rollout.engine import Placement, Request, RolloutEngine, SliceResult, load_engine, run_slice
from hpc_rl.rl.weights.base import WeightReceiver, receiver_of
from hpc_rl.system.accelerators import ENV_RAY_HIDES
from hpc_rl.training import guards


@beats_in_calls
class EngineProcess:
    """Run a RolloutEngine in a Ray actor, with the four calls of a WeightReceiver."""

    _engine: RolloutEngine
    _receiver: WeightReceiver

    def __init__(self, config: EngineJob, pool: str, index: int, placement: Placement, logs: Path) -> None:
        log = logs / f"node{os.environ.get('SLURM_NODEID', '0')}-{pool}-engine{index}.log"
        process.begin(log, sees_node=bool(placement.bundles))
        heart.begin(f"rollout engine {index} of pool {pool}", waits=True)
        self._config = config
        self._placement = replace(placement, log=log)
        self._leaving = Path(os.environ[LEAVING]) if LEAVING in os.environ else None

    def start(self) -> None:
        """Load the model."""
        process.quiet_libraries()
        self._engine = load_engine(self._config, self._placement)
        self._receiver = receiver_of(self._engine)

    @guards.explain_out_of_memory("generation", guards.IN_GENERATION)
    def advance(self, requests: Sequence[Request], slice_s: float, version: int) -> SliceResult:
        """Add requests and generate for a slice of time; see `hpc_rl.rl.rollout.engine.run_slice`."""
        done = run_slice(self._engine, requests, slice_s, version)
        return done._replace(leaves=self._leaving is not None and self._leaving.exists())

    def withdraw(self) -> SliceResult:
        """Give back all requests that are not complete."""
        begun = self._engine.withdraw()
        return run_slice(self._engine, [], 0.0, 0)._replace(begun=begun)

    def take_weights(self, buckets: Sequence[Any]) -> float:
        """Load weights from Ray's object store; return how many seconds this took.

        Args:
            buckets: references; see `hpc_rl.rl.weights.published`.
        """
        began = time.perf_counter()
        self._receiver.start_weight_update()
        for bucket in buckets:
            self._receiver.update_weights(ray.get(bucket))
        self._receiver.finish_weight_update()
        return time.perf_counter() - began

    def answer(self) -> None:
        """Show that the process lives."""

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        self._engine.close()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._receiver.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._receiver.start_weight_update()

    def update_weights(self, update: Any) -> None:
        self._receiver.update_weights(update)

    def finish_weight_update(self) -> None:
        self._receiver.finish_weight_update()


def request_engine(
    config: EngineJob, pool: str, index: int, placement: Placement, slots: Sequence[Slot], cpus: float, logs: Path
) -> Any:
    """Return a Ray actor with an engine, which Ray starts as soon as there is room. It loads its model in `start`.

    Args:
        index: its number in the pool.
        placement: its bundles are chosen here.
        slots: as many bundles of a placement group as rollout.tensor_parallel_size.
        cpus: Ray's CPUs of the actor.
    """
    spec, device, share = engine_spec(config), placement.device, placement.gpu_share
    spread = len(slots) > 1 and device == "cuda"
    # The process of an engine on several GPUs requests none, but looks at the GPUs: the processes that it starts
    # request them.
    variables = spec.process_environment(device) | ({ENV_RAY_HIDES: "0"} if spread else {})
    runtime = {"runtime_env": {"env_vars": variables}} if variables else {}
    own = replace(placement, bundles=tuple(slot.bundle for slot in slots) if spread else ())
    options = slots[0].options(device, 0.0 if spread else share) | {"num_cpus": cpus}
    return ray.remote(EngineProcess).options(**options, **runtime).remote(config, pool, index, own, logs)
