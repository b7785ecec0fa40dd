"""The process of an engine that does not run in the policy's processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_rl.config.rl.rollout import EngineJob
from hpc_rl.liveness.heartbeat import beats_in_calls, heart
from hpc_rl.rl.actors import process
from hpc_rl.rl.rollout.engine import Placement, Request, RolloutEngine, SliceResult, load_engine, run_slice
from hpc_rl.rl.weights.base import WeightReceiver, receiver_of
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

    def start(self) -> None:
        """Load the model."""
        process.quiet_libraries()
        self._engine = load_engine(self._config, self._placement)
        self._receiver = receiver_of(self._engine)

    @guards.explain_out_of_memory("generation", guards.IN_GENERATION)
    def advance(self, requests: Sequence[Request], slice_s: float, version: int) -> SliceResult:
        """Add requests and generate for a slice of time; see `hpc_rl.rl.rollout.engine.run_slice`."""
        return run_slice(self._engine, requests, slice_s, version)

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
