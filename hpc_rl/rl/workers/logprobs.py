"""Log-probabilities of held responses under a causal model: the policy, the reference or the teacher."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import room
from hpc_rl.rl.workers.packed_shard import PackedShard
from hpc_rl.training.models.attention.packed_batch import PackedBatch
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm
from hpc_rl.training.models.lm_head import token_logprobs
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.models.pretrained import Pretrained
from hpc_rl.training.models.teacher import common_outputs, teacher_model
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.offload import ModelOffload


def token_logprobs_of(
    model: CausalLM, batch: PackedBatch, temperature: float, entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [N] and entropies [N] of a micro-batch's response tokens, both differentiable."""
    own = model.sequence.own(batch)
    options = (temperature, entropy, model.softcap)
    own_N = model(own, lambda hidden_NH, weight_VH: token_logprobs(hidden_NH, weight_VH, own.targets_N, *options))
    logprobs_N, entropy_N = (model.sequence.whole(found_N, batch) for found_N in own_N)
    return logprobs_N, entropy_N


@torch.no_grad()
def shard_logprobs(model: CausalLM, held: PackedShard, temperature: float) -> NDArray[np.float32]:
    """Return the log-probabilities of all held response tokens, [N]. Every rank of the model's world calls this."""
    parts = [token_logprobs_of(model, micro.batch, temperature, entropy=False)[0] for micro in held.micro_batches()]
    return torch.cat(parts).cpu().numpy()


class FrozenModel:
    """A causal language model that is not trained: the reference, or the teacher of on-policy distillation."""

    def __init__(self, model: Pretrained[CausalLM], config: PpoConfig, world: World) -> None:
        self._model = load_sharded(model, world, config.trainer)
        self._offload = ModelOffload(config.trainer.offload, self._model)
        self._temperature = config.rollout.temperature

    def logprobs(self, held: PackedShard) -> NDArray[np.float32]:
        """Return the log-probabilities of all held response tokens, [N]. Every rank calls this."""
        with self._offload.computing():
            return shard_logprobs(self._model, held, self._temperature)


def load_reference(config: PpoConfig, world: World) -> FrozenModel:
    """Load a copy of the initial policy."""
    # A GPU computes in bfloat16, and no optimizer needs more digits of these weights.
    settings = config.model if world.device.type == "cpu" else config.model.updated("dtype", "bfloat16")
    return FrozenModel(causal_lm(settings, trained=False, longest=room(config)), config, world)


def load_teacher(config: PpoConfig, world: World) -> FrozenModel:
    """Load the model of teacher.path, which has the policy's tokenizer."""
    path = config.teacher.path
    if path is None:
        raise ValueError("teacher.path is not set, so there is no teacher to load")
    world.together(lambda: common_outputs(path, config.model))
    return FrozenModel(teacher_model(path, config.model, world.on_accelerator), config, world)
