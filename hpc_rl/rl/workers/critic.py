"""The critic on one rank."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.algorithms import losses
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.rl.workers.learner import Columns, Learner, Parts, add
from hpc_rl.rl.workers.packed_shard import MicroBatch, PackedShard
from hpc_rl.training.models.causal_lm import without_noise
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.scalar_model import ScalarModel, check_outputs, critic, refuse_other_vocabulary
from hpc_rl.training.parallel.distributed import World


class Critic(Learner[ScalarModel]):
    """The model of values, which is trained."""

    def __init__(self, config: PpoConfig, world: World) -> None:
        path = config.critic.path or config.model.path
        if config.critic.path is not None:
            world.together(lambda: refuse_other_vocabulary("critic.path", path, config.model))
            world.together(lambda: check_outputs("critic.path", path, 1))
        model = load_sharded(critic(path, config.model), world, config.trainer)
        without_noise(model)
        super().__init__("critic", model, config.critic.optim, config, world)

    @torch.no_grad()
    def values(self, held: PackedShard) -> NDArray[np.float32]:
        """Return the value of the state before each held response token, [N]. Every rank calls this."""
        with self.offload.computing():
            parts = [self.model(micro.batch) for micro in held.micro_batches()]
        return torch.cat(parts).cpu().numpy()

    def loss(self, micro: MicroBatch, columns: Columns, parts: Parts) -> torch.Tensor:
        """Return this micro-batch's share of the loss of its mini-batch. Columns: values, returns, weights."""
        values_N = self.model(micro.batch)
        value = losses.value(values_N, columns["values"], columns["returns"], self.config.critic.cliprange_value)
        add(parts, clipped=value.clipped_N, tokens=torch.ones_like(value.loss_N))
        return (value.loss_N * columns["weights"]).sum()
