"""Options of reinforcement learning (`submit ppo`), and which roles a run of it has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hpc_rl.config.base import Files, Path, Section
from hpc_rl.config.ray import RayJobConfig
from hpc_rl.config.training import ModelConfig, OptimConfig, TrainingConfig

DEFAULT_POOL = "global_pool"
Role = Literal["actor", "critic", "ref", "reward", "rollout"]


class PromptDataConfig(Section):
    train_files: Files
    """Training prompts: parquet or jsonl files, or one name of a `datasets` data set (its train split)."""
    val_files: Files = []
    """Validation prompts, in the same forms (its test split); empty for none."""
    prompt_key: str = "messages"
    """Column with the prompt: text, or chat messages, of which a last turn of the assistant is left out."""
    answer_key: str | None = "answer"
    """Column with the reference answer that the reward function gets; null for none."""
    chat_template: Path | None = None
    """File with a Jinja chat template, for a tokenizer that has none or another one."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["drop", "truncate"] = "drop"
    """What happens to a prompt over max_prompt_length (truncate keeps its end); either way it is counted in the log."""
    max_response_length: int = Field(512, ge=1)
    """Longest response, in tokens."""
    train_batch_size: int = Field(64, ge=1)
    """Prompts per step; each is answered rollout.n times."""
    shuffle: bool = True
    """A new order each epoch."""

    @field_validator("train_files")
    @classmethod
    def _some_files(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("name at least one data file")
        return value


class ActorConfig(Section):
    optim: OptimConfig = OptimConfig(lr=1e-6)
    mini_batch_size: int | None = Field(None, ge=1)
    """Responses per optimizer step; all of a step's responses where null."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over a step's responses, for actor and critic."""


class CriticConfig(Section):
    enable: bool | None = None
    """Whether there is a critic; null: where algorithm.advantage has a use for one."""
    path: Path | None = None
    """Folder or hub name of the model that the critic starts from; the actor's where null."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    cliprange_value: float | None = Field(0.5, gt=0)
    """Largest change of a value within one step's updates (PPO's clipped value loss); null for no clipping."""
    warmup_steps: int = Field(0, ge=0)
    """Steps at the start in which only the critic learns."""


class KlConfig(Section):
    where: Literal["none", "reward", "loss"] = "none"
    """How the policy is held near the reference: a penalty in the reward, a term of the loss, or not at all."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the divergence (http://joschu.net/blog/kl-approx.html); k3 is usual in the loss."""
    coef: float = Field(0.001, ge=0)
    """Weight of the divergence; its start value where target is set."""
    target: float | None = Field(None, gt=0)
    """Divergence per response that an adaptive weight aims at (in the reward only); null for a fixed weight."""
    horizon: int = Field(10_000, ge=1)
    """Responses over which an adaptive weight moves."""


class AlgorithmConfig(Section):
    advantage: Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax"] = "gae"
    """Estimator of advantages; gae alone has a critic."""
    loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """Objective of the policy."""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """How the losses of tokens become one: mean of all; mean over responses of their means; sum over
    max_response_length, averaged over responses (Dr. GRPO)."""
    clip_ratio_low: float = Field(0.2, gt=0)
    """How far the probability ratio may fall below 1; gspo's ratios, of whole responses, want about 3e-4."""
    clip_ratio_high: float = Field(0.2, gt=0)
    """How far it may rise above 1 (DAPO's clip-higher: 0.28; cispo: its cap)."""
    clip_ratio_c: float | None = Field(3.0, gt=1)
    """Dual clip: bound of the ratio where the advantage is negative; null for none."""
    entropy_coeff: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE's lambda."""
    kl: KlConfig = KlConfig()
    filter_groups: bool = False
    """DAPO's dynamic sampling: replace prompts whose responses all score alike, by sampling further prompts."""
    max_gen_batches: int = Field(10, ge=1)
    """Batches of prompts that filter_groups may sample for one step before it gives up."""
    overlong_buffer: int = Field(0, ge=0)
    """DAPO's soft overlong punishment: the penalty rises over the last so many tokens before max_response_length."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Its largest value, at max_response_length."""
    tis_cap: float | None = Field(None, gt=0)
    """Truncated importance sampling: cap of the ratio between trainer's and rollout engine's probabilities, by which
    each token's loss is weighted; null for none."""


class RolloutConfig(Section):
    name: Literal["auto", "hf", "vllm"] = "auto"
    """Engine that generates; auto is vllm on GPUs and hf on CPUs."""
    n: int = Field(1, ge=1)
    """Responses per prompt."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities are of the distribution at this temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the most probable tokens that together have this probability."""
    top_k: int = Field(0, ge=0)
    """Sample among so many most probable tokens; 0 for all."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the engine's weights; auto is bfloat16 on GPUs and float32 on CPUs."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that one vllm engine spreads a model over; divides the pool's GPUs per node."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Part of a GPU's memory that vllm takes."""
    max_num_seqs: int = Field(256, ge=1)
    """Responses that one engine generates at a time."""
    engine_kwargs: dict[str, Any] = {}
    """Further arguments of vllm.LLM, such as disable_cascade_attn."""
    calculate_log_probs: bool = False
    """Report how far the engine's probabilities are from the trainer's (training/rollout_probs_diff_*)."""
    sync_bucket_mb: int = Field(256, ge=1)
    """Weights that travel to the engine at a time, in 10^6 bytes."""


class RewardConfig(Section):
    function: str | None = None
    """gsm8k, math, exact, format, or your own as package.module:function or path/file.py:function."""
    kwargs: dict[str, Any] = {}
    """Further keyword arguments of the function."""
    model: Path | None = None
    """Folder or hub name of a reward model (a sequence classifier with one output) instead of a function."""
    url: str | None = None
    """HTTP endpoint that scores, instead of a function."""
    timeout_s: float = Field(30, gt=0)
    """Longest time for one response."""
    on_error: float = 0.0
    """Score of a response whose reward raised, took too long, or is no number."""
    workers: int = Field(4, ge=1)
    """Responses that are scored at a time."""

    @model_validator(mode="after")
    def _one_source(self) -> RewardConfig:
        if sum(source is not None for source in (self.function, self.model, self.url)) != 1:
            raise ValueError("set exactly one of reward.function, reward.model and reward.url")
        return self


class PoolsConfig(Section):
    spec: dict[str, Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]] = {}
    """Pools of GPUs, by name: how many on each of its nodes. Empty: one, global_pool, of all nodes. For example
    {train: [8, 8], rollout: [8, 8]}."""
    roles: dict[Role, str] = {}
    """Pool of a role (actor, critic, ref, reward, rollout); the first pool where not named."""
    strategy: Literal["STRICT_PACK", "PACK"] = "STRICT_PACK"
    """STRICT_PACK: a pool's entry is on one node, or the job fails; PACK: near each other where they can be."""


class PpoTrainerConfig(TrainingConfig):
    val_before_train: bool = True
    """Validate before the first step."""
    log_val_generations: int = Field(8, ge=0)
    """Validation samples whose texts are logged each time."""


class PpoConfig(RayJobConfig):
    model: ModelConfig
    data: PromptDataConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    pools: PoolsConfig = PoolsConfig()
    trainer: PpoTrainerConfig = PpoTrainerConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> PpoConfig:
        if found := problems(self):
            raise ValueError("\n".join(found))
        return self


def roles_in_use(config: PpoConfig) -> list[Role]:
    """Roles that the algorithm needs: no critic without GAE, no reference without a KL term."""
    roles: list[Role] = ["actor"]
    if config.algorithm.advantage == "gae":
        roles.append("critic")
    if config.algorithm.kl.where != "none":
        roles.append("ref")
    if config.reward.model is not None:
        roles.append("reward")
    return [*roles, "rollout"]


def pool_spec(config: PpoConfig) -> dict[str, list[int]]:
    """GPUs on each node of each pool."""
    trainer = config.trainer
    return config.pools.spec or {DEFAULT_POOL: [trainer.n_gpus_per_node] * trainer.nnodes}


def pool_of(config: PpoConfig, role: Role) -> str:
    """The pool of a role; the first one where none is named."""
    return config.pools.roles.get(role) or next(iter(pool_spec(config)))


def engine_name(config: PpoConfig) -> Literal["hf", "vllm"]:
    """The rollout engine that `auto` stands for."""
    if config.rollout.name != "auto":
        return config.rollout.name
    return "vllm" if config.trainer.uses_gpus else "hf"


def engine_dtype(rollout: RolloutConfig, device: str) -> str:
    """What rollout.dtype stands for: torch's name of a type."""
    if rollout.dtype != "auto":
        return rollout.dtype
    return "bfloat16" if device == "cuda" else "float32"


def problems(config: PpoConfig) -> list[str]:
    """What fits the schema key by key and cannot work together, a line each."""
    return [*_batch_problems(config), *_pool_problems(config), *_algorithm_problems(config)]


def _batch_problems(config: PpoConfig) -> list[str]:
    found = []
    responses = config.data.train_batch_size * config.rollout.n
    size = config.actor.mini_batch_size
    if size is not None and responses % size:
        divisors = [n for n in range(1, responses + 1) if responses % n == 0]
        below = max(n for n in divisors if n < size)
        above = min((n for n in divisors if n > size), default=None)
        nearest = f"nearest that do are {below} and {above}" if above else f"largest that does is {below}"
        found.append(
            f"actor.mini_batch_size {size} does not divide the {responses} responses of a step "
            f"(data.train_batch_size {config.data.train_batch_size} x rollout.n {config.rollout.n}): the {nearest}"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > config.trainer.micro_tokens:
        found.append(
            f"data.max_prompt_length {config.data.max_prompt_length} + data.max_response_length "
            f"{config.data.max_response_length} is over trainer.micro_tokens {config.trainer.micro_tokens}: a sample "
            "is never split, so raise micro_tokens or lower the lengths"
        )
    if config.algorithm.overlong_buffer > config.data.max_response_length:
        found.append(
            f"algorithm.overlong_buffer {config.algorithm.overlong_buffer} is over data.max_response_length "
            f"{config.data.max_response_length}"
        )
    return found


def _pool_problems(config: PpoConfig) -> list[str]:
    found = []
    spec, trainer = pool_spec(config), config.trainer
    unit = "GPUs" if trainer.uses_gpus else "CPU slots"
    for role, pool in config.pools.roles.items():
        if pool not in spec:
            found.append(f"pools.roles.{role} is {pool}, and the pools are {', '.join(spec)}")
    if found:
        return found
    unused = [name for name in spec if not any(pool_of(config, role) == name for role in roles_in_use(config))]
    found += [f"pool {name} has no role: name it in pools.roles, or leave it out" for name in unused]
    asked, there = sum(map(sum, spec.values())), trainer.nnodes * trainer.n_gpus_per_node
    largest = max(max(sizes) for sizes in spec.values())
    if asked > there or largest > trainer.n_gpus_per_node:
        needs = "; ".join(f"pool {name} needs {' + '.join(map(str, sizes))} {unit}" for name, sizes in spec.items())
        found.append(
            f"{needs}; the job has {trainer.nnodes} x {trainer.n_gpus_per_node} "
            "(trainer.nnodes x trainer.n_gpus_per_node), and an entry of a pool is on one node"
        )
    parallel = config.rollout.tensor_parallel_size
    if parallel > 1 and engine_name(config) == "hf":
        found.append(
            f"rollout.tensor_parallel_size {parallel} is for vllm alone: set rollout.name=vllm, or leave it at 1"
        )
        return found
    if parallel > 1 and config.pools.strategy == "PACK":
        found.append(f"pools.strategy=PACK may tear the {parallel} GPUs of an engine apart: use STRICT_PACK")
    name = pool_of(config, "rollout")
    odd = [n for n in spec[name] if n % parallel]
    if odd:
        found.append(
            f"rollout.tensor_parallel_size {parallel} does not divide the {odd[0]} {unit} per node of pool {name}"
        )
    return found


def _algorithm_problems(config: PpoConfig) -> list[str]:
    found = []
    algorithm, n = config.algorithm, config.rollout.n
    if algorithm.advantage in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline") and n < 2:
        found.append(
            f"algorithm.advantage={algorithm.advantage} compares responses to the same prompt, and rollout.n is {n}: "
            "set rollout.n to 2 or more"
        )
    if algorithm.filter_groups and n < 2:
        found.append(f"algorithm.filter_groups compares responses to the same prompt, and rollout.n is {n}")
    if algorithm.filter_groups and algorithm.advantage == "remax":
        found.append("algorithm.filter_groups is for several responses per prompt, remax for one and a greedy one")
    if algorithm.advantage == "gae" and config.critic.enable is False:
        found.append("algorithm.advantage=gae needs the critic that critic.enable=false leaves out")
    if algorithm.advantage != "gae" and config.critic.enable:
        found.append(f"critic.enable=true, but algorithm.advantage={algorithm.advantage} has no use for a critic")
    if algorithm.kl.target is not None and algorithm.kl.where != "reward":
        found.append("algorithm.kl.target adapts the KL penalty in the reward: set algorithm.kl.where=reward")
    if algorithm.kl.where == "loss" and algorithm.kl.estimator == "k1":
        found.append("algorithm.kl.estimator=k1 has no gradient on average: with kl.where=loss take k2 or k3")
    steps = config.trainer.total_training_steps
    if "critic" in roles_in_use(config) and steps is not None and config.critic.warmup_steps >= steps:
        found.append(
            f"critic.warmup_steps {config.critic.warmup_steps} leaves the policy none of the "
            f"trainer.total_training_steps {steps}"
        )
    return found
