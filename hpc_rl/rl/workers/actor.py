"""The policy on one rank."""

from __future__ import annotations

import torch

from hpc_rl.algorithms.kl import KL_ESTIMATORS
from hpc_rl.algorithms.losses import Clip, PolicyBatch
from hpc_rl.algorithms.policy_losses import POLICY_LOSSES
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_name, room
from hpc_rl.formats.model_kind import refuse_other_frequencies
from hpc_rl.rl.workers.learner import Columns, Learner, Parts, add
from hpc_rl.rl.workers.logprobs import token_logprobs_of
from hpc_rl.rl.workers.packed_shard import MicroBatch
from hpc_rl.training.models.causal_lm import CausalLM, causal_lm, count_flops, without_noise
from hpc_rl.training.models.loading import load_sharded
from hpc_rl.training.parallel.distributed import World


class Actor(Learner[CausalLM]):
    """The policy, which is trained."""

    def __init__(self, config: PpoConfig, world: World) -> None:
        model = load_sharded(causal_lm(config.model, longest=room(config)), world, config.trainer)
        engine, settings = engine_name(config.rollout, config.trainer.computes_on), model.hf.config.to_dict()
        rule = ("model.path", config.model.path, settings, engine, room(config))
        world.together(lambda: refuse_other_frequencies(*rule))
        without_noise(model)
        self.flops = count_flops(model)
        super().__init__("actor", model, config.actor.optim, config, world)
        algorithm = config.algorithm
        self._policy_loss = POLICY_LOSSES[algorithm.loss]
        self._clip = Clip(algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c)
        self._kl = KL_ESTIMATORS[algorithm.kl.estimator] if algorithm.kl.where == "loss" else None

    def loss(self, micro: MicroBatch, columns: Columns, parts: Parts) -> torch.Tensor:
        """Return this micro-batch's share of the loss of its mini-batch.

        Columns: advantages and weights; old_logprobs if a step has several updates; is_weights with truncated
        importance sampling; ref_logprobs if the KL term is in the loss.
        """
        algorithm = self.config.algorithm
        logprobs_N, entropy_N = token_logprobs_of(self.model, micro.batch, self.config.rollout.temperature)
        old_logprobs_N = columns.get("old_logprobs", logprobs_N.detach())
        policy = self._policy_loss(
            PolicyBatch(logprobs_N, old_logprobs_N, columns["advantages"], micro.lengths_B, self._clip)
        )
        loss_N = policy.loss_N
        if "is_weights" in columns:
            loss_N = loss_N * columns["is_weights"]
        add(parts, pg_loss=loss_N * columns["weights"], clipped=policy.clipped_N, kl=policy.kl_N, entropy=entropy_N)
        add(parts, tokens=torch.ones_like(loss_N))
        if self._kl is not None:
            kl_N = self._kl(logprobs_N, columns["ref_logprobs"])
            add(parts, kl_loss=kl_N)
            loss_N = loss_N + algorithm.kl.coef * kl_N
        if algorithm.entropy_coeff:
            loss_N = loss_N - algorithm.entropy_coeff * entropy_N
        return (loss_N * columns["weights"]).sum()
