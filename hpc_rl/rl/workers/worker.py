"""A training process: one rank of a pool, with the models of the roles that the pool has.

Models of one pool share processes, since they take turns on the same GPU anyway: a step's responses are then sent to
each rank once, and actor, critic, reference and a colocated `hf` engine all compute on them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.fsdp import FSDPModule

from hpc_rl.config.ppo import PpoConfig, engine_dtype
from hpc_rl.data.chat import chat_template
from hpc_rl.rl.dealing import Shard
from hpc_rl.rl.rollout.engine import Completion, Placement, RolloutEngine, Sampling, load_engine
from hpc_rl.rl.weights.base import EngineActors, WeightSender, WeightSource
from hpc_rl.rl.weights.transfers import open_sender
from hpc_rl.rl.workers import process
from hpc_rl.rl.workers.held import Held, hold
from hpc_rl.rl.workers.learner import Learner, Sums
from hpc_rl.training import distributed, guards
from hpc_rl.training.model import Flops, load_tokenizer
from hpc_rl.training.perf import max_memory_gb, peak_flops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.rl.workers.actor import Actor
    from hpc_rl.rl.workers.critic import Critic
    from hpc_rl.rl.workers.reference import Reference
    from hpc_rl.rl.workers.reward_model import RewardModel

Columns = dict[str, NDArray[np.float32]]


class Worker:
    """One rank of a pool; a Ray actor. Methods that compute are called on all ranks of the pool at once."""

    def __init__(self, config: PpoConfig, pool: str, rank: int, size: int, roles: frozenset[str], logs: Path) -> None:
        self.config = config
        self.rank = rank
        self.size = size
        self.roles = roles
        process.log_to(logs / f"node{os.environ.get('SLURM_NODEID', '0')}-{pool}-rank{rank}.log")
        self._held: Held | None = None
        self._actor: Actor | None = None
        self._critic: Critic | None = None
        self._reference: Reference | None = None
        self._reward: RewardModel | None = None
        self._engine: RolloutEngine | None = None
        self._sender: WeightSender | None = None

    def endpoint(self) -> str:
        return process.free_endpoint()

    def start(self, endpoint: str) -> None:
        """Join the pool's process group and load the models of the roles."""
        process.quiet_libraries()
        own = process.local_rank(os.environ, process.assigned_devices())
        os.environ.update(process.group_environment(self.rank, self.size, endpoint, own))
        torch.manual_seed(self.config.trainer.seed + self.rank)
        self.world = distributed.start(self.config.trainer.device, self.config.ray.start_timeout_s)
        self._load()

    def hold(self, shard: Shard) -> None:
        """Keep a step's responses for the calls that follow."""
        self._held = hold(shard, self.world.device)

    @guards.explain_out_of_memory("the policy's log-probabilities")
    def logprobs(self) -> NDArray[np.float32]:
        """The policy's, of all held response tokens."""
        from hpc_rl.rl.workers.logprobs import held_logprobs

        return held_logprobs(self.actor.model, self.held, self.config.rollout.temperature)

    @guards.explain_out_of_memory("the reference's log-probabilities")
    def ref_logprobs(self) -> NDArray[np.float32]:
        assert self._reference is not None
        return self._reference.logprobs(self.held)

    @guards.explain_out_of_memory("the critic's values")
    def values(self) -> NDArray[np.float32]:
        return self.critic.values(self.held)

    @guards.explain_out_of_memory("the reward model's scores")
    def reward_scores(self, shard: Shard) -> NDArray[np.float32]:
        assert self._reward is not None
        return self._reward.scores(shard)

    def update(self, role: str, columns: Columns, step: int, total_steps: int) -> Sums:
        """Updates of one step; see Learner.update."""
        learner = self._learner(role)
        tensors = {name: torch.tensor(column, device=self.world.device) for name, column in columns.items()}
        return learner.update(self.held, tensors, step, total_steps)

    @guards.explain_out_of_memory("generation", guards.IN_GENERATION)
    def generate(
        self, prompts: Sequence[NDArray[np.int32]], seeds: Sequence[int], sampling: Sampling
    ) -> list[Completion]:
        """By the engine in this process."""
        assert self._engine is not None
        return self._engine.generate(prompts, seeds, sampling)

    def sync_engine(self) -> None:
        """Give the engine in this process the policy's weights. Every rank calls this."""
        assert self._engine is not None
        if self.is_sharded:
            self._engine.load_weights(self._weights())

    def connect_engines(self, engines: EngineActors, transfer: str, endpoint: str) -> None:
        """Prepare `send_weights`. Every rank calls this, while the engines are up."""
        bucket_bytes = self.config.rollout.sync_bucket_mb * 10**6
        self._sender = open_sender(transfer, self._weights(), engines, self.world, bucket_bytes, endpoint)

    def send_weights(self) -> None:
        """Give the engines in other processes the policy's weights. Every rank calls this."""
        assert self._sender is not None
        self._sender.send_weights()

    def sleep_engine(self) -> None:
        assert self._engine is not None
        self._engine.sleep()

    def save(self, role: str, path: Path) -> None:
        self._learner(role).save(path, self._tokenizer() if role == "actor" else None)

    def load(self, role: str, path: Path) -> None:
        self._learner(role).load(path)

    def free_cache(self) -> None:
        """Give back memory that torch keeps for later, before another process takes it."""
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def max_memory_gb(self) -> float:
        """Most memory held so far, in 10^9 bytes."""
        return max_memory_gb(self.world.device)

    def flops(self) -> tuple[Flops, float | None]:
        """What training the policy costs, and what this rank's device can do in a second, if that is known."""
        return self.actor.flops, peak_flops(self.world.device)

    @property
    def held(self) -> Held:
        assert self._held is not None
        return self._held

    @property
    def actor(self) -> Actor:
        assert self._actor is not None
        return self._actor

    @property
    def critic(self) -> Critic:
        assert self._critic is not None
        return self._critic

    @property
    def is_sharded(self) -> bool:
        """Whether the policy is an FSDP module, whose parameters are parts of tensors."""
        return isinstance(self.actor.model, FSDPModule)

    def _weights(self) -> WeightSource:
        """The policy's, as the engines hold them."""
        dtype = engine_dtype(self.config.rollout, self.config.trainer.device)
        return WeightSource(self.actor.model.hf, getattr(torch, dtype))

    def _load(self) -> None:
        from hpc_rl.rl.workers.actor import Actor
        from hpc_rl.rl.workers.critic import Critic
        from hpc_rl.rl.workers.reference import Reference
        from hpc_rl.rl.workers.reward_model import RewardModel

        config, world, roles = self.config, self.world, self.roles
        with guards.explain_out_of_memory("loading the models"):
            self._actor = Actor(config, world) if "actor" in roles else None
            self._critic = Critic(config, world) if "critic" in roles else None
            self._reference = Reference(config, world) if "ref" in roles else None
            self._reward = RewardModel(config, world) if "reward" in roles else None
            self._engine = self._load_engine() if "rollout" in roles else None

    def _load_engine(self) -> RolloutEngine:
        """Load an engine on the policy's own module, or on a copy if the policy is sharded."""
        placement = Placement(self.config.trainer.device)
        return load_engine(self.config, placement, None if self.is_sharded else self.actor.model)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """As the exported model is to have it."""
        tokenizer = load_tokenizer(self.config.model)
        tokenizer.chat_template = chat_template(tokenizer, self.config.data)
        return tokenizer

    def _learner(self, role: str) -> Learner[Any]:
        return self.actor if role == "actor" else self.critic
