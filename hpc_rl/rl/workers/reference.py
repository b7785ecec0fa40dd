"""The reference on one rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import room
from hpc_rl.rl.workers.held import Held
from hpc_rl.rl.workers.logprobs import held_logprobs
from hpc_rl.training.models.causal_lm import causal_lm
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.offload import ModelOffload


class Reference:
    """A frozen copy of the initial policy."""

    def __init__(self, config: PpoConfig, world: World) -> None:
        # A GPU computes in bfloat16, and no optimizer needs more digits of these weights.
        settings = config.model if world.device.type == "cpu" else config.model.updated("dtype", "bfloat16")
        pretrained = causal_lm(settings, trained=False, longest=room(config))
        self._model = load_sharded(pretrained, world, config.trainer)
        self._offload = ModelOffload(config.trainer.offload, self._model)
        self._temperature = config.rollout.temperature

    def logprobs(self, held: Held) -> NDArray[np.float32]:
        """Return the log-probabilities of all held response tokens, [N]. Every rank calls this."""
        with self._offload.computing():
            return held_logprobs(self._model, held, self._temperature)
