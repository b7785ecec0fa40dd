"""A training process: one rank of a pool, with the models of the pool's roles.

The models of a pool share processes, since they take turns on the same GPU anyway: a step's responses are sent to each
rank once, and actor, critic, reference and an engine in the same process all compute on them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.config.rl.rollout import engine_dtype, engine_spec
from hpc_rl.data.templates.chat import as_trained, chat_template
from hpc_rl.liveness.heartbeat import beats_in_calls, heart
from hpc_rl.rl.actors import process
from hpc_rl.rl.carriers.base import ColumnSink, FlatColumns, Parcel
from hpc_rl.rl.loop.assignment import Shard
from hpc_rl.rl.rollout.engine import Placement, Request, RolloutEngine, SliceResult, load_engine, run_slice
from hpc_rl.rl.weights.base import EngineActors, WeightSender, WeightSource
from hpc_rl.rl.weights.published import publish
from hpc_rl.rl.weights.transfers import open_sender
from hpc_rl.rl.workers.actor import Actor
from hpc_rl.rl.workers.critic import Critic
from hpc_rl.rl.workers.learner import Learner, Sums
from hpc_rl.rl.workers.logprobs import FrozenModel, load_reference, load_teacher, shard_logprobs
from hpc_rl.rl.workers.packed_shard import PackedShard, pack_shard
from hpc_rl.rl.workers.reward_model import RewardModel
from hpc_rl.run_dir import RunDir
from hpc_rl.training import guards, memory_snapshot
from hpc_rl.training.checkpoints.export import write_weights
from hpc_rl.training.models.causal_lm import Flops, load_tokenizer
from hpc_rl.training.models.lora import without_adapters
from hpc_rl.training.models.stored_form import StoredForm
from hpc_rl.training.parallel import distributed, flight_recorder
from hpc_rl.training.parallel.distributed import World
from hpc_rl.training.parallel.sharding import is_divided
from hpc_rl.training.perf import Span, Spans, max_memory_gb, memory_bytes, peak_flops
from hpc_rl.training.profiling import Trace, trace_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.rl.actors.cluster import DriverConfig

MODELS: dict[str, Callable[[Any, World], Any]] = {
    "actor": Actor,
    "critic": Critic,
    "ref": load_reference,
    "teacher": load_teacher,
    "reward": RewardModel,
}
"""Role -> what loads its model. The role `rollout` is an engine, which may share the actor's model."""


@beats_in_calls
class Worker:
    """One rank of a pool; a Ray actor. Methods that compute are called on all ranks of the pool at once.

    The process consists of parts, by name: the models of its roles (see MODELS), `rollout` (the engine), `held` (the
    step's responses) and `sender` (of weights to engines in other processes). A call that needs a missing part raises
    RuntimeError.
    """

    def __init__(
        self, config: DriverConfig, pool: str, rank: int, size: int, on_node: int, roles: frozenset[str], logs: Path
    ) -> None:
        self.config = config
        self.pool = pool
        self.rank = rank
        self.size = size
        self.on_node = on_node
        self.roles = roles
        self._logs = logs
        self._parts: dict[str, Any] = {}
        self._spans = Spans()
        process.begin(logs / f"node{os.environ.get('SLURM_NODEID', '0')}-{pool}-rank{rank}.log")
        heart.begin(f"rank {rank} of pool {pool}", waits=True)

    def new_group_dir(self) -> Path:
        """Return a new folder in which the ranks of the pool meet."""
        return process.new_group_dir(self._logs, self.on_node == self.size)

    def start(self, group_dir: Path) -> None:
        """Join the pool's process group and load the models of the roles."""
        process.quiet_libraries()
        process.bind_near_device()
        os.environ.update(process.group_environment(self.rank, self.size, self.on_node, group_dir))
        torch.manual_seed(self.config.trainer.seed + self.rank)
        flight_recorder.prepare(self._logs, self.pool)
        self.world = distributed.start(self.config.trainer.computes_on, self.config.ray.start_timeout_s)
        memory_snapshot.record(self.world.device, self._logs / f"memory-{self.pool}-rank{self.rank}.pickle")
        with guards.explain_out_of_memory("loading the models"):
            for role, load in MODELS.items():
                if role in self.roles:
                    self._parts[role] = load(self.config, self.world)
            if "rollout" in self.roles:
                self._parts["rollout"] = self._load_engine()

    def hold(self, shard: Parcel[Shard]) -> None:
        """Keep a step's responses for the calls that follow."""
        self._parts["held"] = pack_shard(shard.open(), self.world.device)

    @guards.explain_out_of_memory("the policy's log-probabilities")
    def logprobs(self, sink: ColumnSink, shard: Shard | None = None) -> NDArray[np.float32] | None:
        """Send the policy's log-probabilities of all response tokens of a shard. Default: of those held."""
        with self._spans("old_log_prob"), self.actor.offload.computing():
            found = shard_logprobs(self.actor.model, self._responses(shard), self.config.rollout.temperature)
        return sink.send(found)

    @guards.explain_out_of_memory("the reference's log-probabilities")
    def ref_logprobs(self, sink: ColumnSink, shard: Shard | None = None) -> NDArray[np.float32] | None:
        """Send the reference's log-probabilities: see `logprobs`. With adapters, the reference is the policy without
        them."""
        if self._training.model.lora.is_used:
            with self._spans("ref"), self.actor.offload.computing(), without_adapters(self.actor.model):
                found = shard_logprobs(self.actor.model, self._responses(shard), self.config.rollout.temperature)
            return sink.send(found)
        reference: FrozenModel = self._part("ref")
        with self._spans("ref"):
            found = reference.logprobs(self._responses(shard))
        return sink.send(found)

    @guards.explain_out_of_memory("the teacher's log-probabilities")
    def teacher_logprobs(self, sink: ColumnSink, shard: Shard | None = None) -> NDArray[np.float32] | None:
        """Send the teacher's log-probabilities: see `logprobs`."""
        teacher: FrozenModel = self._part("teacher")
        with self._spans("teacher"):
            found = teacher.logprobs(self._responses(shard))
        return sink.send(found)

    @guards.explain_out_of_memory("the critic's values")
    def values(self, sink: ColumnSink, shard: Shard | None = None) -> NDArray[np.float32] | None:
        """Send the critic's values at all response tokens: see `logprobs`."""
        critic: Critic = self._part("critic")
        with self._spans("values"):
            found = critic.values(self._responses(shard))
        return sink.send(found)

    @guards.explain_out_of_memory("the reward model's scores")
    def reward_scores(self, shard: Shard) -> NDArray[np.float32]:
        """Return the reward model's score of each response of a shard."""
        model: RewardModel = self._part("reward")
        with self._spans("reward"):
            return model.scores(shard)

    @guards.explain_out_of_memory("an update")
    def update(self, role: str, columns: Parcel[FlatColumns], step: int, total_steps: int, epochs: int) -> Sums:
        """Train actor or critic on the held responses; see Learner.update."""
        learner: Learner[Any] = self._part(role)
        tensors = {name: torch.tensor(column, device=self.world.device) for name, column in columns.open().items()}
        with self._spans(f"update_{role}"):
            return learner.update(self.held, tensors, step, total_steps, epochs)

    @guards.explain_out_of_memory("generation", guards.IN_GENERATION)
    def advance(self, requests: Sequence[Request], slice_s: float, version: int) -> SliceResult:
        """Add requests to the engine in this process and let it generate; see `hpc_rl.rl.rollout.engine.run_slice`."""
        return run_slice(self.engine, requests, slice_s, version)

    @guards.explain_out_of_memory("sending weights")
    def sync_engine(self) -> None:
        """Give the engine in this process the policy's weights. Every rank calls this."""
        engine = self.engine
        if self.is_sharded:
            with self.actor.offload.computing():
                engine.load_weights(self._weights())

    def connect_engines(self, engines: EngineActors, transfer: str) -> None:
        """Prepare `send_weights`. Every rank calls this, after the engines have started."""
        if "sender" in self._parts:  # of engines, some of which have been replaced
            self._part("sender").shutdown()
        bucket_bytes = self._training.rollout.sync_bucket_mb * 10**6
        self._parts["sender"] = open_sender(transfer, self._weights(), engines, self.world, bucket_bytes)

    @guards.explain_out_of_memory("sending weights")
    def send_weights(self) -> None:
        """Send the policy's weights to engines in other processes. Every rank calls this."""
        sender: WeightSender = self._part("sender")
        with self.actor.offload.computing():
            sender.send_weights()

    @guards.explain_out_of_memory("publishing weights")
    def publish_weights(self) -> list[Any]:
        """Put the policy's weights into Ray's object store; see `hpc_rl.rl.weights.published`."""
        with self.actor.offload.computing():
            return publish(self._weights(), self.world, self._training.rollout.sync_bucket_mb * 10**6)

    def sleep_engine(self) -> None:
        """Free the device memory of the engine in this process."""
        self.engine.sleep()

    @guards.explain_out_of_memory("saving")
    def save(self, role: str, path: Path) -> None:
        """Begin to write model and optimizer of actor or critic; see Learner.save."""
        learner: Learner[Any] = self._part(role)
        learner.save(path, self._tokenizer() if role == "actor" else None)

    def saved(self, role: str) -> None:
        """Wait until the latest `save` of a role is complete."""
        learner: Learner[Any] = self._part(role)
        learner.saved()

    def export(self, path: Path, folder: Path) -> None:
        """Write this rank's part of the exported weights; see training.export."""
        write_weights(path, folder, None, self.rank, self.size)

    @guards.explain_out_of_memory("loading a checkpoint")
    def load(self, role: str, path: Path) -> None:
        """Read model and optimizer of actor or critic."""
        learner: Learner[Any] = self._part(role)
        learner.load(path)

    def begin_trace(self) -> None:
        """Record what this rank computes from now on."""
        self._parts["trace"] = Trace()

    def end_trace(self, run: RunDir, step: int) -> None:
        """Write what this rank has computed since `begin_trace` as its trace of a step."""
        trace: Trace = self._part("trace")
        trace.write(trace_path(run, step, self.rank, self.pool))
        del self._parts["trace"]

    def free_cache(self) -> None:
        """Free the memory that torch keeps for later use, before another process needs it."""
        if self.world.on_accelerator:
            torch.get_device_module(self.world.device.type).empty_cache()

    def take_spans(self) -> dict[str, list[Span]]:
        """Return when this rank computed since the last call, by phase; see Spans.take."""
        return self._spans.take()

    def memory_bytes(self) -> int | None:
        """Return the memory of this rank's GPU; None on a CPU."""
        return memory_bytes(self.world.device)

    def max_memory_gb(self) -> float:
        """Return the maximum memory held so far, in 10^9 bytes."""
        return max_memory_gb(self.world.device)

    def flops(self) -> tuple[Flops, float | None]:
        """Return the cost of training the policy, and the peak speed of this rank's device (None if unknown)."""
        return self.actor.flops, peak_flops(self.world.device)

    @property
    def held(self) -> PackedShard:
        """The responses of the latest `hold`."""
        held: PackedShard = self._part("held")
        return held

    @property
    def actor(self) -> Actor:
        """The policy that is trained."""
        actor: Actor = self._part("actor")
        return actor

    @property
    def engine(self) -> RolloutEngine:
        """The engine in this process."""
        engine: RolloutEngine = self._part("rollout")
        return engine

    @property
    def is_sharded(self) -> bool:
        """Whether the policy has parts of tensors, or copies to compute with. An engine then needs its own weights."""
        return is_divided(self.actor.model)

    @property
    def _training(self) -> PpoConfig:
        """The configuration of a run that trains a policy."""
        assert isinstance(self.config, PpoConfig)
        return self.config

    def _responses(self, shard: Shard | None) -> PackedShard:
        """Return the responses of a shard, or those held."""
        return self.held if shard is None else pack_shard(shard, self.world.device)

    def _part(self, name: str) -> Any:
        if name not in self._parts:
            roles, parts = ", ".join(sorted(self.roles)), ", ".join(self._parts) or "nothing"
            raise RuntimeError(
                f"rank {self.rank} of pool {self.pool} has no {name}: its roles are {roles}, and it has {parts} so far"
            )
        return self._parts[name]

    def _weights(self) -> WeightSource:
        """Return the policy's weights, or only its adapters, in the engines' type."""
        hf = self.actor.model.hf
        dtype = engine_dtype(self.config.rollout, self.config.trainer.computes_on)
        adapters_only = not self.config.rollout.merge_lora
        stored = StoredForm(hf) if engine_spec(self.config).reads_files else None
        return WeightSource(hf, getattr(torch, dtype), adapters_only, stored)

    def _load_engine(self) -> RolloutEngine:
        """Load an engine on the policy's own module, or on a copy if the policy is sharded."""
        placement = Placement(self.config.trainer.computes_on)
        return load_engine(self.config, placement, None if self.is_sharded else self.actor.model)

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer as it is exported with the policy, whose settings follow it."""
        tokenizer = load_tokenizer(self.config.model)
        tokenizer.chat_template = chat_template(tokenizer, self.config.data)
        return as_trained(tokenizer, self.actor.model.hf)
