"""Options of reinforcement learning (`submit ppo`), and the roles of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pydantic import Field, ValidationInfo, field_validator

from hpc_rl.config.base import Path, Section
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.rl.agent import AgentConfig
from hpc_rl.config.rl.algorithm import AlgorithmConfig
from hpc_rl.config.rl.carriers import CARRIERS, CarrierSpec
from hpc_rl.config.rl.engines import ENGINES
from hpc_rl.config.rl.environment import EnvironmentConfig
from hpc_rl.config.rl.pools import PoolsConfig, Role, can_be_even, pool_of, pool_problems, pool_spec, slot_unit
from hpc_rl.config.rl.prompts import PromptDataConfig
from hpc_rl.config.rl.reward import OptionalRewardConfig, require_reward
from hpc_rl.config.rl.rollout import RolloutConfig, engine_name, engine_problems, engine_spec, sync_problems
from hpc_rl.config.training.common import ModelConfig, OptimConfig, TrainingConfig, gpu_problems, row_limit
from hpc_rl.config.training.distill import OnPolicyTeacherConfig

_COMPARES_RESPONSES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Advantage estimators that compare several responses to the same prompt."""


class ActorOptimConfig(OptimConfig):
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""


class ActorConfig(Section):
    optim: ActorOptimConfig = ActorOptimConfig()
    mini_batch_size: int | None = Field(None, ge=1)
    """Responses per optimizer update. null: all responses of a step."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over the responses of a step, for the actor and for the critic."""
    shuffle: bool = False
    """Draw new mini-batches from all responses of the step in each pass, for the actor and for the critic. false: the
    mini-batches are neighbouring prompts, the same in each pass."""


class CriticConfig(Section):
    path: Path | None = None
    """Folder or hub name of the model that the critic starts from. null: model.path."""
    optim: OptimConfig = OptimConfig()
    cliprange_value: float | None = Field(0.5, gt=0)
    """Largest change of a value during the updates of one step (PPO's clipped value loss). null: no clipping."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps at the start of training in which only the critic learns."""


class TransferQueueConfig(Section):
    enable: bool = False
    """Carry each step's responses and token columns to the training ranks with the package TransferQueue (extra
    transfer-queue), which stores them on all training nodes, instead of in Ray's calls."""


class PpoTrainerConfig(TrainingConfig):
    model_timeout_s: int = Field(1800, ge=1)
    """Deadline in seconds for the rollout engines to start, and again for all workers to load their models. The nodes
    and Ray have a limit of their own (ray.start_timeout_s)."""
    val_before_train: bool = True
    """Validate before the first step."""
    log_val_generations: int = Field(8, ge=0)
    """Number of validation responses to log as text at each validation."""


class PpoConfig(RayJobConfig):
    model: ModelConfig
    data: PromptDataConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    reward: OptionalRewardConfig = OptionalRewardConfig()
    teacher: OnPolicyTeacherConfig = OnPolicyTeacherConfig()
    pools: PoolsConfig = PoolsConfig()
    transfer_queue: TransferQueueConfig = TransferQueueConfig()
    trainer: PpoTrainerConfig = PpoTrainerConfig()

    @property
    def roles(self) -> list[Role]:
        """The roles that the algorithm needs: no critic without GAE, no reference without a KL term. With adapters, the
        reference is the actor without them."""
        roles: list[Role] = ["actor"]
        if self.algorithm.advantage == "gae":
            roles.append("critic")
        if self.algorithm.kl.where != "none" and not self.model.lora.is_used:
            roles.append("ref")
        if self.teacher.path is not None:
            roles.append("teacher")
        if self.reward.model is not None:
            roles.append("reward")
        return [*roles, "rollout"]

    @property
    def optimizers(self) -> dict[str, OptimConfig]:
        """The options of each trained model's optimizer, by the names of their sections."""
        own: dict[str, OptimConfig] = {"actor.optim": self.actor.optim}
        return own | ({"critic.optim": self.critic.optim} if "critic" in self.roles else {})

    @property
    def carrier_spec(self) -> CarrierSpec:
        """The run's row of CARRIERS."""
        return CARRIERS["transfer_queue" if self.transfer_queue.enable else "ray"]

    @property
    def truncates_logprobs(self) -> bool:
        """Whether the engine's log-probabilities are those of the distribution after top_p and top_k: the correction
        needs them."""
        return self.algorithm.corrects and (self.rollout.top_p < 1 or self.rollout.top_k > 0)

    @property
    def scores(self) -> bool:
        """Whether responses are scored: functions alone, as tools, give no reward."""
        return bool(self.reward.sources) or self.environment.name is not None or self.agent.is_used

    @property
    def needs_scores(self) -> bool:
        """Whether every response needs a score."""
        return self.algorithm.advantage != "opd"

    @property
    def hang_timeout_s(self) -> float:
        limit_s = self.trainer.hang_timeout_s
        return max(limit_s, 2 * self.reward.timeout_s) if limit_s else 0.0  # nothing happens while one reward is slow

    @field_validator("reward")
    @classmethod
    def _is_needed(cls, value: OptionalRewardConfig, info: ValidationInfo) -> OptionalRewardConfig:
        algorithm, agent = info.data.get("algorithm"), info.data.get("agent")
        if algorithm is None or algorithm.advantage == "opd" or agent is None or agent.is_used:
            return value
        return require_reward(value, info.data.get("environment"))

    def problems(self) -> Iterator[str]:
        yield from self._batch_problems()
        yield from self._teacher_problems()
        yield from pool_problems(self)
        yield from self._rank_problems()
        yield from engine_problems(self)
        yield from sync_problems(self)
        yield from self._group_problems()
        yield from self._lora_problems()
        yield from self._lent_problems()
        yield from self._staleness_problems()
        if self.agent.is_used and self.environment.is_used:
            own = "environment.name" if self.environment.name is not None else "environment.tools"
            yield (
                f"agent.endpoint and {own} are both set, but only one of them can lead the conversations: remove one; "
                "an agent calls its tools itself"
            )

    def _batch_problems(self) -> Iterator[str]:
        data, size = self.data, self.actor.mini_batch_size
        responses = data.train_batch_size * self.rollout.n
        if size is not None and responses % size:
            yield (
                f"actor.mini_batch_size {size} does not divide the {responses} responses of a step "
                f"(data.train_batch_size {data.train_batch_size} x rollout.n {self.rollout.n})"
                f"{_nearest_divisors(size, responses)}"
            )
        if self.actor.shuffle and (size is None or size >= responses):
            yield (
                f"actor.shuffle has no effect: all {responses} responses of a step are one mini-batch; set "
                "actor.mini_batch_size to less, or remove actor.shuffle"
            )
        if not self.trainer.holds(data.longest):
            yield (
                f"data.max_prompt_length {data.max_prompt_length} + data.max_response_length "
                f"{data.max_response_length} exceeds {row_limit(self.trainer)}: a sample "
                "is never split, so raise micro_tokens or lower the lengths"
            )
        if self.algorithm.overlong_buffer > data.max_response_length:
            yield (
                f"algorithm.overlong_buffer {self.algorithm.overlong_buffer} exceeds data.max_response_length "
                f"{data.max_response_length}: lower it"
            )

    def _rank_problems(self) -> Iterator[str]:
        """Yield a message for each pool whose ranks cannot be divided as requested."""
        trainer, spec = self.trainer, pool_spec(self)
        computing = {pool_of(self, role) for role in self.roles if role != "rollout"}
        for name in sorted(computing & spec.keys()):
            sizes = " + ".join(map(str, spec[name]))
            if any(ranks % trainer.sequence_parallel for ranks in spec[name]):
                yield (
                    f"trainer.sequence_parallel={trainer.sequence_parallel} does not divide the ranks of each node of "
                    f"pool {name}: {sizes}; use a divisor of their numbers, or another pools.spec"
                )
            if trainer.sharding == "hybrid" and not can_be_even(spec[name], trainer.nnodes, trainer.n_gpus_per_node):
                yield (
                    f"trainer.sharding=hybrid needs the same number of ranks on each node, and pool {name} has "
                    f"{sizes} {slot_unit(self)} on {trainer.nnodes} nodes of {trainer.n_gpus_per_node}: use entries of "
                    "one size in pools.spec, the same number of them on each node, or trainer.sharding=full"
                )

    def _teacher_problems(self) -> Iterator[str]:
        algorithm = self.algorithm
        if algorithm.advantage != "opd":
            return
        if self.teacher.path is None:
            yield "algorithm.advantage=opd learns from a teacher: set teacher.path"
        if self.teacher.path == self.model.path:
            yield (
                f"teacher.path and model.path are both {self.model.path}: the policy has nothing to learn from itself; "
                "name another teacher"
            )
        unused = {
            "algorithm.kl.where=reward": algorithm.kl.where == "reward",
            "algorithm.filter_groups": algorithm.filter_groups,
            "algorithm.overlong_buffer": algorithm.overlong_buffer > 0,
        }
        yield from (
            f"{option} changes rewards, which algorithm.advantage=opd does not use: remove it, or use another "
            "estimator; the teacher is then added to its advantages"
            for option, is_set in unused.items()
            if is_set
        )

    def _group_problems(self) -> Iterator[str]:
        algorithm, n, steps = self.algorithm, self.rollout.n, self.trainer.total_training_steps
        if algorithm.advantage in _COMPARES_RESPONSES and n < 2:
            yield (
                f"algorithm.advantage={algorithm.advantage} compares responses to the same prompt, but rollout.n is "
                f"{n}: set rollout.n to 2 or more"
            )
        if algorithm.filter_groups and n < 2:
            yield (
                f"algorithm.filter_groups compares responses to the same prompt, but rollout.n is {n}: set rollout.n "
                "to 2 or more"
            )
        warmup = self.critic.warmup_steps
        if "critic" in self.roles and steps is not None and warmup >= steps:
            yield (
                f"critic.warmup_steps {warmup} leaves the policy none of the trainer.total_training_steps {steps}: "
                "lower it"
            )

    def _lent_problems(self) -> Iterator[str]:
        """Yield a message for an option of own engines, if all engines are lent ones."""
        if self.rollout.engines == "own":
            return
        if "rollout" in self.pools.roles:
            yield (
                f"pools.roles.rollout={self.pools.roles['rollout']} with rollout.engines=lent: the job has no engines "
                "for a pool; remove one of the two"
            )

    def _staleness_problems(self) -> Iterator[str]:
        rollout, staleness = self.rollout, self.rollout.staleness
        if not staleness:
            if rollout.partial:
                yield (
                    "rollout.partial=true has no effect with rollout.staleness=0: all responses of a step are complete "
                    "before its update; set rollout.staleness, or remove it"
                )
            return
        pool = pool_of(self, "rollout")
        others = [role for role in self.roles if role != "rollout" and pool_of(self, role) == pool]
        if others and rollout.engines == "own":
            yield self._shares_engines(pool, others)
        truncates = rollout.top_p < 1 or rollout.top_k > 0
        scaled = engine_spec(self).truncates_scaled and rollout.temperature != 1
        if truncates and scaled and not self.algorithm.corrects:
            yield (
                f"rollout.staleness={staleness} with rollout.top_p or top_k and rollout.temperature="
                f"{rollout.temperature:g}: vLLM reports the probabilities of the truncated distribution, and the "
                "trainer would compare them with those of all tokens; set algorithm.tis_cap=2, or remove top_p and "
                "top_k, or the temperature"
            )
        if rollout.calculate_log_probs and not self.algorithm.corrects:
            yield (
                f"rollout.calculate_log_probs with rollout.staleness={staleness} needs the log-probabilities of a "
                "correction: set algorithm.tis_cap=2, or remove rollout.calculate_log_probs"
            )
        if rollout.partial and not rollout.merge_lora:
            yield (
                "rollout.partial=true with rollout.merge_lora=false: vLLM finishes a response with the adapters that "
                "it began with; remove one of them"
            )

    def _shares_engines(self, pool: str, others: Sequence[Role]) -> str:
        """Return the message about engines that are to generate while other roles of their pool compute."""
        trainer, unit = self.trainer, slot_unit(self)
        sizes = pool_spec(self)[pool]
        message = (
            f"rollout.staleness={self.rollout.staleness} generates and trains at the same time, so engines need a pool "
            f"of their own, but {', '.join(others)} and rollout share the {' + '.join(map(str, sizes))} {unit} of pool "
            f"{pool}: "
        )
        own = [trainer.n_gpus_per_node] * trainer.nnodes
        if len(own) > 1:
            train, engines = own[: -(len(own) // 2)], own[-(len(own) // 2) :]
        elif own[0] > 1:
            train, engines = [own[0] - own[0] // 2], [own[0] // 2]
        else:
            return f"{message}they need at least 2 {unit}, and the job has 1; raise trainer.n_gpus_per_node"
        spec = f"{{train: {train}, rollout: {engines}}}"
        return f"{message}set, for example, pools.spec='{spec}' and pools.roles.rollout=rollout"

    def _lora_problems(self) -> Iterator[str]:
        yield from gpu_problems(self.model, self.trainer)
        if self.model.lora.dropout:
            yield "model.lora.dropout: the policy has no dropout in reinforcement learning; remove it"
        truncates = self.rollout.top_p < 1 or self.rollout.top_k > 0
        scaled = engine_spec(self).truncates_scaled and self.rollout.temperature != 1
        if self.model.lora.is_used and truncates and (self.algorithm.corrects or scaled):
            yield (
                "rollout.top_p or top_k with a correction (algorithm.tis_*) or with rollout.temperature: the engine's "
                "log-probabilities are then those of another distribution, and cannot show that the adapters "
                "(model.lora) reach the engine; remove top_p and top_k, or the others"
            )
        if self.model.lora.is_used and "ref" in self.pools.roles:
            yield "pools.roles.ref: with model.lora, the reference is the actor without its adapters; remove it"
        if not self.rollout.merge_lora:
            yield from self._separate_lora_problems()

    def _separate_lora_problems(self) -> Iterator[str]:
        engine, rank = engine_spec(self), self.model.lora.rank
        if not self.model.lora.is_used:
            yield "rollout.merge_lora=false has no effect without adapters: set model.lora.rank, or remove it"
        elif self.model.lora.quantize is not None:
            yield (
                "rollout.merge_lora=false with model.lora.quantize: the engines' model would not have the policy's "
                "4-bit weights; remove one of them"
            )
        elif not engine.max_lora_rank:
            able = " or ".join(name for name, each in ENGINES.items() if each.max_lora_rank)
            yield (
                f"rollout.merge_lora=false: rollout.name={engine_name(self.rollout, self.trainer.computes_on)} has no "
                f"adapters of its own, and takes merged weights only; set rollout.name={able}, or remove it"
            )
        elif rank is not None and (problem := engine.lora_rank_problem(rank)):
            yield problem


def _nearest_divisors(size: int, total: int) -> str:
    """Name the divisors of a number that are nearest to another number, for the end of a message."""
    if total > 10**12:
        return ""  # the search would take longer than a second
    small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    divisors = {*small, *(total // n for n in small)}
    below = max(n for n in divisors if n < size)
    above = min((n for n in divisors if n > size), default=None)
    return f": the nearest that do are {below} and {above}" if above else f": the largest that does is {below}"
