"""The process of an engine that does not run in the policy's processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.rollout import EngineJob
from hpc_rl.host.heartbeat import beats_in_calls, heart
from hpc_rl.rl import process
from hpc_rl.rl.rollout.engine import (
    BlockEngine,
    Completion,
    Placement,
    RolloutEngine,
    Sampling,
    blocks_of,
    load_engine,
)
from hpc_rl.rl.weights.base import WeightReceiver, receiver_of
from hpc_rl.training import guards


@beats_in_calls
class EngineProcess:
    """Run a RolloutEngine in a Ray actor, with the four calls of a WeightReceiver."""

    _engine: RolloutEngine
    _blocks: BlockEngine
    _receiver: WeightReceiver

    def __init__(self, config: EngineJob, pool: str, index: int, placement: Placement, logs: Path) -> None:
        process.log_to(logs / f"node{os.environ.get('SLURM_NODEID', '0')}-{pool}-engine{index}.log")
        heart.begin(f"rollout engine {index} of pool {pool}", waits=True)
        self._config = config
        self._placement = placement

    def start(self) -> None:
        """Load the model."""
        process.quiet_libraries()
        process.narrow_devices(os.environ, process.assigned_devices())
        self._engine = load_engine(self._config, self._placement)
        self._blocks = blocks_of(self._engine)
        self._receiver = receiver_of(self._engine)

    @guards.explain_out_of_memory("generation", guards.IN_GENERATION)
    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        return self._engine.generate(prompts, seeds, sampling)

    def add_block(self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling) -> None:
        self._blocks.add_block(prompts, seeds, sampling)

    @guards.explain_out_of_memory("generation", guards.IN_GENERATION)
    def next_block(self) -> list[Completion]:
        return self._blocks.next_block()

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
