"""The teacher of on-policy distillation on one rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rl.workers.held import Held
from hpc_rl.rl.workers.logprobs import held_logprobs
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.teacher import common_outputs, teacher_model
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.offload import ModelOffload


class Teacher:
    """A frozen model with the policy's tokenizer."""

    def __init__(self, config: PpoConfig, world: World) -> None:
        path = config.teacher.path
        if path is None:
            raise ValueError("teacher.path is not set, so there is no teacher to load")
        world.together(lambda: common_outputs(path, config.model))
        self._model = load_sharded(teacher_model(path, config.model, world.on_accelerator), world, config.trainer)
        self._offload = ModelOffload(config.trainer.offload, self._model)
        self._temperature = config.rollout.temperature

    def logprobs(self, held: Held) -> NDArray[np.float32]:
        """Return the log-probabilities of all held response tokens, [N]. Every rank calls this."""
        with self._offload.computing():
            return held_logprobs(self._model, held, self._temperature)
