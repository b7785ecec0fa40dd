"""A process of its own for an engine, in a pool without the policy, or beside it where the engine is vLLM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.ppo import PpoConfig, engine_name
from hpc_rl.rl.rollout.base import Completion, Sampling
from hpc_rl.rl.rollout.vllm import Place, VllmRollout
from hpc_rl.rl.weights.sync import HostReceiver
from hpc_rl.rl.workers import process
from hpc_rl.training import guards


class Engine:
    """A RolloutEngine in a Ray actor, with the four calls by which new weights come (rl/weights/sync.py)."""

    def __init__(self, config: PpoConfig, pool: str, index: int, place: Place, logs: Path) -> None:
        process.log_to(logs / f"node{os.environ.get('SLURM_NODEID', '0')}-{pool}-engine{index}.log")
        self._config = config
        self._place = place

    def start(self) -> None:
        """Load the model."""
        from hpc_rl.rl.rollout.load import eos_token_ids, load_hf_engine

        process.quiet_libraries()
        process.narrow_devices(os.environ, process.assigned_devices())
        config = self._config
        if engine_name(config) == "hf":
            self._engine: Any = load_hf_engine(config, None)
            self._receiver: Any = HostReceiver(self._engine)
            return
        longest = config.data.max_prompt_length + config.data.max_response_length
        ends = eos_token_ids(config)
        self._engine = VllmRollout(config.model, config.rollout, ends, longest, config.trainer.seed, self._place)
        self._receiver = self._engine

    @guards.explain_out_of_memory("generation", guards.IN_GENERATION)
    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        completions: list[Completion] = self._engine.generate(prompts, seeds, sampling)
        return completions

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        """End the engine's own processes, which would leave shared memory behind if they were killed."""
        if isinstance(self._engine, VllmRollout):
            self._engine.close()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._receiver.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._receiver.start_weight_update()

    def update_weights(self, update: Any) -> None:
        self._receiver.update_weights(update)

    def finish_weight_update(self) -> None:
        self._receiver.finish_weight_update()
