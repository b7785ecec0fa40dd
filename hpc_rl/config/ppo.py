"""Options of reinforcement learning (`submit ppo`), and the roles and pools of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Protocol, Self

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from hpc_rl.config.base import Files, Path, Section, SomeFiles, Table, possible_path
from hpc_rl.config.distill import OnPolicyTeacherConfig
from hpc_rl.config.engines import ENGINES, EngineName, EngineSpec, default_engine
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.training import ModelConfig, ModelSource, OptimConfig, TrainingConfig
from hpc_rl.host.accelerators import DeviceName

DEFAULT_POOL = "global_pool"
Role = Literal["actor", "critic", "ref", "teacher", "reward", "rollout"]
_COMPARES_RESPONSES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Advantage estimators that compare several responses to the same prompt."""


class PromptFiles(Section):
    train_files: SomeFiles
    """Training prompts: one or more data files (jsonl, json, csv, tsv or parquet), or the name of one data set on the
    hub (its train split)."""
    val_files: Files = []
    """Validation prompts, in the same forms (of a data set on the hub, its test split). Empty: no validation."""


class PromptConfig(Section):
    """Options of prompts that `submit ppo`, `generate` and `eval` share."""

    prompt_key: str = "messages"
    """Column with the prompt: text, or chat messages. If the last message is the assistant's, it is ignored."""
    answer_key: str | None = "answer"
    """Column with the reference answer for the reward function. null: no reference answers."""
    chat_template: Path | None = None
    """File with a Jinja chat template that replaces the tokenizer's. null: the tokenizer's own template."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["drop", "truncate"] = "drop"
    """Treatment of prompts longer than max_prompt_length: leave them out, or keep only their end. The log counts
    them."""
    max_response_length: int = Field(512, ge=1)
    """Longest response, in tokens."""


class PromptDataConfig(PromptConfig, PromptFiles):
    train_batch_size: int = Field(64, ge=1)
    """Prompts per step. The policy generates rollout.n responses to each of them."""
    shuffle: bool = True
    """Use a new random order in each epoch."""


class ActorOptimConfig(OptimConfig):
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""


class ActorConfig(Section):
    optim: ActorOptimConfig = ActorOptimConfig()
    mini_batch_size: int | None = Field(None, ge=1)
    """Responses per optimizer update. null: all responses of a step."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over the responses of a step, for the actor and for the critic."""


class CriticConfig(Section):
    path: Path | None = None
    """Folder or hub name of the model that the critic starts from. null: model.path."""
    optim: OptimConfig = OptimConfig()
    cliprange_value: float | None = Field(0.5, gt=0)
    """Largest change of a value during the updates of one step (PPO's clipped value loss). null: no clipping."""
    warmup_steps: int = Field(0, ge=0)
    """Number of steps at the start of training in which only the critic learns."""


class KlConfig(Section):
    where: Literal["none", "reward", "loss"] = "none"
    """Where to penalise divergence from the reference policy: in the reward, in the loss, or not at all."""
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k1"
    """Estimator of the KL divergence (http://joschu.net/blog/kl-approx.html). k3 is the usual choice in the loss. k3+
    has the value of k3 and, in the loss, the unbiased gradient."""
    coef: float = Field(0.001, ge=0)
    """Coefficient of the KL divergence. If target is set, its initial value."""
    target: float | None = Field(None, gt=0)
    """KL divergence per response that an adaptive coefficient aims at (where=reward only). null: the coefficient is
    fixed."""
    horizon: int = Field(10_000, ge=1)
    """Number of responses over which an adaptive coefficient changes."""

    def problems(self) -> Iterator[str]:
        if self.target is not None and self.where != "reward":
            yield "algorithm.kl.target adapts the KL penalty in the reward: set algorithm.kl.where=reward"
        if self.where == "loss" and self.estimator == "k1":
            yield "algorithm.kl.estimator=k1 has no gradient on average: with kl.where=loss use k2, k3 or k3+"


class AlgorithmConfig(Section):
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opd"] = (
        "gae"
    )
    """Estimator of advantages. Only gae trains a critic. opd (on-policy distillation) learns from teacher.path alone
    and needs no reward."""
    loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Objective of the policy."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses are combined: the mean over all tokens; the mean over responses of each response's mean, of its
    sum, or of its sum divided by max_response_length (Dr. GRPO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What grpo divides by. group: the standard deviation of the scores of a prompt's responses. batch: that of all
    responses of the step. none: nothing."""
    mask_truncated: bool = False
    """Leave responses that were cut at max_response_length out of the loss (DAPO's overlong filtering)."""
    clip_ratio_low: float = Field(0.2, gt=0)
    """Lower clip: how far the probability ratio may fall below 1. With loss=gspo, whose ratios are of whole responses,
    about 3e-4 is usual. With loss=cispo, which has no lower bound, it is at least 1."""
    clip_ratio_high: float = Field(0.2, gt=0)
    """Upper clip: how far the probability ratio may exceed 1 (0.28 in DAPO). With loss=cispo, the cap of the ratio."""
    clip_ratio_c: float | None = Field(3.0, gt=1)
    """Dual clip: upper bound of the probability ratio of tokens with a negative advantage. null: no bound."""
    entropy_coeff: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount factor per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of generalised advantage estimation (advantage=gae)."""
    kl: KlConfig = KlConfig()
    filter_groups: bool = False
    """Replace prompts whose responses all have the same score by newly sampled ones (DAPO's dynamic sampling)."""
    max_gen_batches: int = Field(10, ge=1)
    """Largest number of prompt batches that filter_groups samples for one step. If they do not suffice, the run
    fails."""
    overlong_buffer: int = Field(0, ge=0)
    """Number of tokens before max_response_length over which a length penalty rises linearly (DAPO's soft overlong
    punishment). 0: no penalty."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Largest length penalty, for responses of max_response_length tokens (see overlong_buffer)."""
    tis_cap: float | None = Field(None, gt=0)
    """Truncated importance sampling: weight each token's loss by the ratio of the trainer's to the rollout engine's
    probability, capped at this value. null: no weighting."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio that tis_cap and tis_bounds apply to: each token's, the product over its response, or their geometric
    mean."""
    tis_bounds: tuple[float, float] | None = None
    """Lowest and highest ratio of the trainer's to the rollout engine's probability, as [low, high]. Tokens beyond are
    left out of the loss. null: no bounds."""

    @property
    def corrects(self) -> bool:
        """Whether losses are weighted by the difference between trainer and engine."""
        return self.tis_cap is not None or self.tis_bounds is not None

    def problems(self) -> Iterator[str]:
        if self.loss == "cispo" and self.clip_ratio_low < 1:
            yield (
                f"algorithm.clip_ratio_low is {self.clip_ratio_low:g}, but algorithm.loss=cispo has no lower bound: "
                "use the preset algorithm=cispo, or set algorithm.clip_ratio_low=1"
            )
        if self.scale_rewards != "group" and self.advantage != "grpo":
            yield f"algorithm.scale_rewards is for algorithm.advantage=grpo, and not for {self.advantage}: leave it out"
        if self.tis_bounds is not None and not 0 <= self.tis_bounds[0] < self.tis_bounds[1]:
            low, high = self.tis_bounds
            yield f"algorithm.tis_bounds is [{low:g}, {high:g}]: give two ratios of at least 0, the lower one first"
        if self.tis_level != "token" and not self.corrects:
            yield (
                f"algorithm.tis_level={self.tis_level} has no effect without a correction: set algorithm.tis_cap or "
                "algorithm.tis_bounds, or remove it"
            )
        if self.filter_groups and self.advantage == "remax":
            yield (
                "algorithm.filter_groups needs several responses per prompt, and algorithm.advantage=remax uses one "
                "and a greedy one: choose another estimator, or set filter_groups=false"
            )


class ValSamplingConfig(Section):
    n: int = Field(1, ge=1)
    """Responses to each validation prompt; the score is their mean."""
    temperature: float = Field(0.0, ge=0)
    """Temperature of validation responses. 0: always the most probable token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample validation responses from the smallest set of most probable tokens whose probabilities add up to this
    value."""

    def problems(self) -> Iterator[str]:
        if self.n > 1 and self.temperature == 0:
            yield f"rollout.val.n is {self.n}, but at rollout.val.temperature=0 all responses are the same: raise it"
        if self.top_p < 1 and self.temperature == 0:
            yield (
                f"rollout.val.top_p={self.top_p:g} has no effect at rollout.val.temperature=0, which always takes the "
                "most probable token: raise the temperature, or remove it"
            )


class EngineConfig(Section):
    """Options of the engines that `submit ppo`, `generate` and `eval` share."""

    name: EngineName = "auto"
    """Engine that generates responses. auto: vllm on GPUs and hf on CPUs."""
    n: int = Field(1, ge=1)
    """Responses per prompt."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. Log-probabilities are those of the distribution at this temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of most probable tokens whose probabilities add up to this value."""
    top_k: int = Field(0, ge=0)
    """Sample from this number of most probable tokens. 0: from all tokens."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the engine's weights. auto: bfloat16 on GPUs and float32 on CPUs."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs over which one vllm engine splits the model. It has to divide the GPUs per node of the rollout pool."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of each GPU's memory that vllm uses. null: 0.9, or 0.5 on GPUs that training workers use too."""
    max_num_seqs: int = Field(256, ge=1)
    """Largest number of responses that one engine generates at the same time."""
    engine_kwargs: Table = {}
    """Additional arguments of vllm.LLM, such as disable_cascade_attn."""


class RolloutConfig(EngineConfig):
    val: ValSamplingConfig = ValSamplingConfig()
    calculate_log_probs: bool = False
    """Measure how much the engine's probabilities differ from the trainer's (training/rollout_probs_diff_*). With a
    correction and top_p or top_k they differ anyway, and are not compared."""
    sync_bucket_mb: int = Field(256, ge=1)
    """Size of the buckets in which new weights are sent to the engine, in 10^6 bytes."""


_ONE_REWARD = "set exactly one of reward.function, reward.functions, reward.model and reward.url"


class OptionalRewardConfig(Section):
    """Options of a reward, which may be left out."""

    function: str | None = None
    """Reward function: gsm8k, math, exact, format, or your own as package.module:function or path/file.py:function."""
    functions: list[Annotated[str, Field(min_length=1)]] = []
    """Several reward functions instead of one, such as [gsm8k, format]. The score is the weighted sum of theirs."""
    weights: list[Annotated[float, Field(allow_inf_nan=False)]] = []
    """Weight of each of reward.functions. Empty: all weights are 1."""
    kwargs: Table = {}
    """Additional keyword arguments of the reward function; with reward.functions, a table of them for each name."""
    model: Path | None = None
    """Folder or hub name of a reward model (a sequence classifier with one output), instead of a function."""
    url: str | None = None
    """URL of an HTTP server that computes scores, instead of a function."""
    timeout_s: float = Field(30, gt=0)
    """Longest time in seconds to score one response."""
    on_error: float | None = None
    """Score of a response for which the reward raised an error, took too long, or did not return a number. null: it has
    no score, and is left out of means, deviations, filters and the loss."""
    clip: tuple[float, float] | None = None
    """Lowest and highest score, to which others are limited, as [low, high]; on_error is not. null: no limits."""
    workers: int = Field(4, ge=1)
    """Number of responses to score at the same time."""

    @field_validator("function")
    @classmethod
    def _possible_path(cls, value: str | None) -> str | None:
        if value is not None:
            possible_path(value)
        return value

    @property
    def sources(self) -> list[str]:
        """The options that are set of those that name a reward: one, or none for on-policy distillation."""
        return [name for name in ("function", "functions", "model", "url") if getattr(self, name) not in (None, [])]

    def alone(self, function: str) -> Self:
        """Return the configuration of one of `functions` by itself, whose failures have no score."""
        own = {"function": function, "kwargs": self.kwargs.get(function, {})}
        return self.model_copy(update={**own, "functions": [], "weights": [], "on_error": None, "clip": None})

    def each_function(self) -> list[Self]:
        """Return the configuration of each reward function by itself; none for a model or a URL."""
        return [self] if self.function is not None else [self.alone(name) for name in self.functions]

    def problems(self) -> Iterator[str]:
        if len(self.sources) > 1:
            yield f"{_ONE_REWARD}, found {' and '.join(self.sources)}"
        yield from self._several_problems()
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            yield f"reward.clip is [{self.clip[0]:g}, {self.clip[1]:g}]: put the lower number first"

    def _several_problems(self) -> Iterator[str]:
        names = self.functions
        if self.weights and len(self.weights) != len(names):
            yield f"reward.weights has {len(self.weights)} numbers for {len(names)} reward.functions: give one for each"
        if len({*names}) < len(names):
            yield f"reward.functions [{', '.join(names)}] has a name twice: name each function once"
        for name, arguments in self.kwargs.items() if names else ():
            if name not in names or not isinstance(arguments, dict):
                yield (
                    f"reward.kwargs.{name}: with reward.functions, write a table for each function, such as "
                    f"reward.kwargs={{{names[0]}: {{NAME: VALUE}}}}"
                )


class RewardConfig(OptionalRewardConfig):
    def problems(self) -> Iterator[str]:
        if not self.sources:
            raise PydanticCustomError("missing", _ONE_REWARD)
        yield from super().problems()


class PoolsConfig(Section):
    spec: dict[str, Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]] = {}
    """Pools of GPUs: for each name, the number of GPUs on each of its nodes. For example {train: [8, 8], rollout: [8]}.
    Empty: one pool, global_pool, of all nodes."""
    roles: dict[Role, str] = {}
    """Pool of each role (actor, critic, ref, teacher, reward, rollout). Roles that are not listed use the first
    pool."""
    strategy: Literal["STRICT_PACK", "PACK"] = "STRICT_PACK"
    """Placement of each entry of a pool. STRICT_PACK: on one node, or the job fails. PACK: on one node if possible."""

    def unknown_pools(self, known: dict[str, list[int]]) -> Iterator[str]:
        """Yield a message for each role whose pool is not one of the known ones."""
        for role, pool in self.roles.items():
            if pool not in known:
                yield f"pools.roles.{role} is {pool}, which is not one of the pools: {', '.join(known)}"


class PpoTrainerConfig(TrainingConfig):
    model_timeout_s: int = Field(1800, ge=1)
    """Deadline in seconds for the rollout engines to start, and again for all workers to load their models. The nodes
    and Ray have a limit of their own (ray.start_timeout_s)."""
    val_before_train: bool = True
    """Validate before the first step."""
    log_val_generations: int = Field(8, ge=0)
    """Number of validation responses to log as text at each validation."""


class EngineTrainer(Protocol):
    """What an engine reads of the section `trainer`."""

    @property
    def seed(self) -> int: ...
    @property
    def computes_on(self) -> DeviceName: ...


class EngineJob(Protocol):
    """A configuration of a job with engines (PpoConfig, GenerateConfig), as far as an engine reads it."""

    @property
    def model(self) -> ModelSource: ...
    @property
    def data(self) -> PromptConfig: ...
    @property
    def rollout(self) -> EngineConfig: ...
    @property
    def trainer(self) -> EngineTrainer: ...
    @property
    def truncates_logprobs(self) -> bool: ...


class PpoConfig(RayJobConfig):
    model: ModelConfig
    data: PromptDataConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: OptionalRewardConfig = OptionalRewardConfig()
    teacher: OnPolicyTeacherConfig = OnPolicyTeacherConfig()
    pools: PoolsConfig = PoolsConfig()
    trainer: PpoTrainerConfig = PpoTrainerConfig()

    @property
    def truncates_logprobs(self) -> bool:
        """Whether the engine's log-probabilities are those of the distribution after top_p and top_k: the correction
        needs them."""
        return self.algorithm.corrects and (self.rollout.top_p < 1 or self.rollout.top_k > 0)

    @property
    def hang_timeout_s(self) -> float:
        limit_s = self.trainer.hang_timeout_s
        return max(limit_s, 2 * self.reward.timeout_s) if limit_s else 0.0  # nothing happens while one reward is slow

    @field_validator("reward")
    @classmethod
    def _is_needed(cls, value: OptionalRewardConfig, info: ValidationInfo) -> OptionalRewardConfig:
        algorithm = info.data.get("algorithm")
        if algorithm is not None and algorithm.advantage != "opd" and not value.sources:
            raise PydanticCustomError("missing", _ONE_REWARD)
        return value

    def problems(self) -> Iterator[str]:
        yield from self._batch_problems()
        yield from self._teacher_problems()
        yield from self._pool_problems()
        yield from self._group_problems()
        yield from self._lora_problems()

    def _batch_problems(self) -> Iterator[str]:
        data, size = self.data, self.actor.mini_batch_size
        responses = data.train_batch_size * self.rollout.n
        if size is not None and responses % size:
            yield (
                f"actor.mini_batch_size {size} does not divide the {responses} responses of a step "
                f"(data.train_batch_size {data.train_batch_size} x rollout.n {self.rollout.n})"
                f"{_nearest_divisors(size, responses)}"
            )
        if data.max_prompt_length + data.max_response_length > self.trainer.micro_tokens:
            yield (
                f"data.max_prompt_length {data.max_prompt_length} + data.max_response_length "
                f"{data.max_response_length} exceeds trainer.micro_tokens {self.trainer.micro_tokens}: a sample "
                "is never split, so raise micro_tokens or lower the lengths"
            )
        if self.algorithm.overlong_buffer > data.max_response_length:
            yield (
                f"algorithm.overlong_buffer {self.algorithm.overlong_buffer} exceeds data.max_response_length "
                f"{data.max_response_length}: lower it"
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
            "estimator, to whose advantages teacher.path is added"
            for option, is_set in unused.items()
            if is_set
        )

    def _pool_problems(self) -> Iterator[str]:
        spec, trainer = pool_spec(self), self.trainer
        if unknown := list(self.pools.unknown_pools(spec)):
            yield from unknown
            return
        used = {pool_of(self, role) for role in roles_in_use(self)}
        yield from (
            f"pool {name} has no role: name it in pools.roles, or leave it out" for name in spec if name not in used
        )
        needed, there = sum(map(sum, spec.values())), trainer.nnodes * trainer.n_gpus_per_node
        if needed > there or max(map(max, spec.values())) > trainer.n_gpus_per_node:
            needs = "; ".join(f"pool {name} needs {' + '.join(map(str, n))} {self._unit}" for name, n in spec.items())
            yield (
                f"{needs}; the job has {trainer.nnodes} x {trainer.n_gpus_per_node} "
                "(trainer.nnodes x trainer.n_gpus_per_node), and each entry of a pool has to be on one node"
            )
        yield from self._engine_problems(spec)

    def _engine_problems(self, spec: dict[str, list[int]]) -> Iterator[str]:
        parallel, name = self.rollout.tensor_parallel_size, pool_of(self, "rollout")
        if parallel > 1 and self.pools.strategy == "PACK":
            yield f"pools.strategy=PACK may place the {parallel} GPUs of an engine on several nodes: use STRICT_PACK"
        yield from engine_problems(self, f"{self._unit} per node of pool {name}", spec[name])

    def _group_problems(self) -> Iterator[str]:
        algorithm, n, steps = self.algorithm, self.rollout.n, self.trainer.total_training_steps
        if algorithm.advantage in _COMPARES_RESPONSES and n < 2:
            yield (
                f"algorithm.advantage={algorithm.advantage} compares responses to the same prompt, and rollout.n is "
                f"{n}: set rollout.n to 2 or more"
            )
        if algorithm.filter_groups and n < 2:
            yield (
                f"algorithm.filter_groups compares responses to the same prompt, and rollout.n is {n}: set rollout.n "
                "to 2 or more"
            )
        warmup = self.critic.warmup_steps
        if "critic" in roles_in_use(self) and steps is not None and warmup >= steps:
            yield (
                f"critic.warmup_steps {warmup} leaves the policy none of the trainer.total_training_steps {steps}: "
                "lower it"
            )

    def _lora_problems(self) -> Iterator[str]:
        if self.model.lora.dropout:
            yield "model.lora.dropout: the policy has no dropout in reinforcement learning; remove it"
        if self.model.lora.is_used and self.truncates_logprobs:
            yield (
                "rollout.top_p or top_k with a correction (algorithm.tis_*): the engine's log-probabilities are then "
                "those of another distribution, and cannot show that the adapters (model.lora) reach the engine; "
                "remove top_p and top_k, or the correction"
            )
        if self.model.lora.is_used and "ref" in self.pools.roles:
            yield "pools.roles.ref: with model.lora, the reference is the actor without its adapters; remove it"

    @property
    def _unit(self) -> str:
        return "GPUs" if self.trainer.uses_gpus else "CPU slots"


def roles_in_use(config: PpoConfig) -> list[Role]:
    """Return the roles that the algorithm needs: no critic without GAE, no reference without a KL term. With adapters,
    the reference is the actor without them."""
    roles: list[Role] = ["actor"]
    if config.algorithm.advantage == "gae":
        roles.append("critic")
    if config.algorithm.kl.where != "none" and not config.model.lora.is_used:
        roles.append("ref")
    if config.teacher.path is not None:
        roles.append("teacher")
    if config.reward.model is not None:
        roles.append("reward")
    return [*roles, "rollout"]


def pool_spec(config: PpoConfig) -> dict[str, list[int]]:
    """Return the number of GPUs on each node of each pool."""
    trainer = config.trainer
    return config.pools.spec or {DEFAULT_POOL: [trainer.n_gpus_per_node] * trainer.nnodes}


def pool_of(config: PpoConfig, role: Role) -> str:
    """Return the pool of a role, which is the first pool if none is named."""
    return config.pools.roles.get(role) or next(iter(pool_spec(config)))


def engine_problems(config: EngineJob, slots: str, sizes: Sequence[int]) -> Iterator[str]:
    """Yield a message for each option of the engines that cannot work.

    Args:
        slots: what each engine takes some of, for messages: `GPUs per node`.
        sizes: the number of them on each node.
    """
    device, parallel = config.trainer.computes_on, config.rollout.tensor_parallel_size
    engine = engine_name(config.rollout, device)
    if device not in ENGINES[engine].dtypes:
        yield (
            f"rollout.name {engine} does not support trainer.device={device}: use "
            f"rollout.name={default_engine(device)}, or trainer.device={' or '.join(ENGINES[engine].dtypes)}"
        )
    if parallel > 1 and not ENGINES[engine].tensor_parallel:
        able = " or ".join(name for name, each in ENGINES.items() if each.tensor_parallel)
        yield (
            f"rollout.tensor_parallel_size is {parallel}, which rollout.name={engine} does not support: "
            f"set rollout.name={able}, or rollout.tensor_parallel_size=1"
        )
        return
    if odd := [n for n in sizes if n % parallel]:
        yield f"rollout.tensor_parallel_size {parallel} does not divide the {odd[0]} {slots}"


def engine_name(rollout: EngineConfig, device: str) -> str:
    """Return the name of the rollout engine; rollout.name=auto depends on the device."""
    return default_engine(device) if rollout.name == "auto" else rollout.name


def engine_spec(config: EngineJob) -> EngineSpec:
    """Return the run's row of ENGINES."""
    return ENGINES[engine_name(config.rollout, config.trainer.computes_on)]


def engine_dtype(rollout: EngineConfig, device: str) -> str:
    """Return torch's name for the type of the engine's weights; rollout.dtype=auto depends on engine and device."""
    return ENGINES[engine_name(rollout, device)].dtypes[device] if rollout.dtype == "auto" else rollout.dtype


def _nearest_divisors(size: int, total: int) -> str:
    """Name the divisors of a number that are nearest to another number, for the end of a message."""
    if total > 10**12:
        return ""  # the search would take longer than a second
    small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    divisors = {*small, *(total // n for n in small)}
    below = max(n for n in divisors if n < size)
    above = min((n for n in divisors if n > size), default=None)
    return f": the nearest that do are {below} and {above}" if above else f": the largest that does is {below}"
