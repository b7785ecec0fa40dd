"""A reward model on one rank: a sequence classifier that scores each response at its last token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.rl.loop.assignment import Shard
from hpc_rl.rl.workers.packed_shard import pack_shard
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.scalar_model import check_outputs, refuse_other_vocabulary, reward_model
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.offload import ModelOffload

if TYPE_CHECKING:
    from hpc_rl.rl.actors.cluster import DriverConfig


class RewardModel:
    """A frozen sequence classifier. The score is its output, or the sum of its outputs with reward.weights."""

    def __init__(self, config: DriverConfig, world: World) -> None:
        path = config.reward.model
        if path is None:
            raise ValueError("reward.model is not set, so there is no reward model to load")
        world.together(lambda: refuse_other_vocabulary("reward.model", path, config.model))
        outputs = config.reward.outputs
        world.together(lambda: check_outputs("reward.model", path, outputs))
        dtype = torch.float32 if world.device.type == "cpu" else torch.bfloat16
        self._model = load_sharded(reward_model(path, config.model, dtype, outputs), world, config.trainer)
        self._offload = ModelOffload(config.trainer.offload, self._model)
        self._weights_K = np.array(config.reward.weights or [1.0], np.float32)
        self._world = world

    @torch.no_grad()
    def scores(self, shard: Shard) -> NDArray[np.float32]:
        """Return the score of each sample of the shard, [B]. Every rank calls this."""
        with self._offload.computing():
            parts = [
                self._model(micro.batch.last_tokens())[: len(micro.lengths_B)]
                for micro in pack_shard(shard, self._world.device).micro_batches()
            ]
        scores_BK: NDArray[np.float32] = torch.cat(parts).cpu().numpy()
        return scores_BK @ self._weights_K
