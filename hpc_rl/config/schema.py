"""Every option once: its name, type, range, default and meaning.

YAML files in ``configs/`` hold only what a recipe changes; defaults are written here and nowhere else.
Light on purpose: a login node imports this without torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hpc_rl.config.container import ContainerConfig
from hpc_rl.config.roles import problems
from hpc_rl.config.section import Files, Path, Section
from hpc_rl.config.slurm import SlurmConfig


class ModelConfig(Section):
    path: Path
    """Folder of a Hugging Face model, or its name on the hub."""
    tokenizer_path: Path | None = None
    """Folder or hub name of the tokenizer; the model's own where null."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository ships."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights and of the exported model. On a GPU the arithmetic is bfloat16 either way."""
    enable_gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: about a third more time, far less memory."""
    use_torch_compile: bool = False
    """Compile each transformer layer with torch.compile."""


class DataConfig(Section):
    train_files: Files
    """Training data: parquet or jsonl files, or one name of a `datasets` data set (its train split)."""
    val_files: Files = []
    """Validation data, in the same forms (its test split); empty for none."""
    messages_key: str = "messages"
    """Column with chat messages (role, content). Used where prompt_key is null."""
    prompt_key: str | None = None
    """Column with the prompt text; together with response_key instead of messages_key."""
    response_key: str | None = None
    """Column with the response text."""
    chat_template: Path | None = None
    """File with a Jinja chat template, for a tokenizer that has none or another one."""
    max_length: int = Field(1024, ge=2)
    """Longest sample, in tokens."""
    truncation: Literal["truncate", "drop"] = "truncate"
    """What happens to a sample over max_length; either way it is counted in the log."""
    train_batch_size: int = Field(64, ge=1)
    """Samples per optimizer step, over all ranks."""
    shuffle: bool = True
    """A new order each epoch, the same for any number of ranks."""

    @field_validator("train_files")
    @classmethod
    def _some_files(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("name at least one data file")
        return value

    @model_validator(mode="after")
    def _both_columns(self) -> DataConfig:
        if (self.prompt_key is None) != (self.response_key is None):
            raise ValueError(
                "prompt_key and response_key go together: set both, or neither (then messages_key is used)"
            )
        return self


class OptimConfig(Section):
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's decoupled weight decay; norms and biases are left out."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 for no clipping."""
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    """Part of all steps in which the learning rate rises linearly from 0."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where cosine and linear end, as a part of the peak."""


class TrainerConfig(Section):
    nnodes: int = Field(1, ge=1)
    """Nodes of the job (--nodes)."""
    n_gpus_per_node: int = Field(1, ge=1)
    """Processes per node, one for each GPU; with device=cpu one for each CPU process (--gpus-per-node)."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What the processes compute on; cpu asks Slurm for no GPUs."""


class TrainingConfig(TrainerConfig):
    """What every training loop of this project has."""

    total_epochs: int = Field(1, ge=1)
    """Passes over the training data."""
    total_training_steps: int | None = Field(None, ge=1)
    """Steps of training; replaces total_epochs where set."""
    micro_tokens: int = Field(4096, ge=2)
    """Tokens of one forward and backward pass on one rank: the setting that decides memory use."""
    sharding: Literal["full", "gradients", "none"] = "full"
    """FSDP: full shards parameters between layers too; gradients keeps them gathered from forward to backward (ZeRO-2,
    less traffic); none replicates the model on every rank and averages gradients once per step."""
    save_freq: int = Field(0, ge=0)
    """Checkpoint every N steps; 0: by time (save_minutes), at the end and on a stop."""
    save_minutes: float = Field(30, ge=0)
    """Checkpoint after so many minutes without one; 0: never by time."""
    max_ckpt_to_keep: int = Field(2, ge=1)
    """Checkpoints kept, the newest ones."""
    test_freq: int = Field(0, ge=0)
    """Validate every N steps; 0: only at the end, if there are val_files."""
    export: bool = True
    """Write the Hugging Face folder `model/` into the run directory at the end."""
    seed: int = Field(1, ge=0)
    """Seed of data order and random numbers."""
    logger: list[Literal["console", "wandb"]] = ["console"]
    """Where metrics go besides metrics.jsonl, which is always written."""
    project_name: str = "hpc-rl"
    """Project in wandb."""
    experiment_name: str | None = None
    """Name in wandb; the run directory's name where null."""
    wandb_mode: Literal["online", "offline"] | None = None
    """offline writes into the run directory, and `hpc-rl wandb sync` uploads later; null: offline where cache.offline
    says that nodes have no internet."""
    wandb_proxy: str | None = None
    """HTTP proxy for wandb alone."""


class SftTrainerConfig(TrainingConfig):
    packing: bool = True
    """Pack samples into micro-batches of at most micro_tokens tokens; false: one sample at a time."""


class CacheConfig(Section):
    hf_home: Path | None = None
    """Folder of the Hugging Face cache (HF_HOME), which all nodes see; as in the environment where null."""
    wandb_dir: Path | None = None
    """Folder of wandb's own cache, for home folders with a small quota; wandb's default where null."""
    offline: bool = False
    """Compute nodes have no internet: models and data sets come from the cache, where `hpc-rl fetch` puts them, and
    wandb writes into the run directory."""


class JobConfig(Section):
    """What the launcher needs of any job; `submit torchrun` uses it as it is."""

    trainer: TrainerConfig = TrainerConfig()
    slurm: SlurmConfig = SlurmConfig()
    cache: CacheConfig = CacheConfig()
    container: ContainerConfig = ContainerConfig()


class SftConfig(JobConfig):
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig = OptimConfig()
    trainer: SftTrainerConfig = SftTrainerConfig()

    @model_validator(mode="after")
    def _sample_fits(self) -> SftConfig:
        if self.data.max_length > self.trainer.micro_tokens:
            raise ValueError(
                f"data.max_length {self.data.max_length} is over trainer.micro_tokens {self.trainer.micro_tokens}: "
                "a sample is never split, so raise micro_tokens or lower max_length"
            )
        return self


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


Role = Literal["actor", "critic", "ref", "reward", "rollout"]


class PoolsConfig(Section):
    spec: dict[str, Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]] = {}
    """Pools of GPUs, by name: how many on each of its nodes. Empty: one, global_pool, of all nodes. For example
    {train: [8, 8], rollout: [8, 8]}."""
    roles: dict[Role, str] = {}
    """Pool of a role (actor, critic, ref, reward, rollout); the first pool where not named."""
    strategy: Literal["STRICT_PACK", "PACK"] = "STRICT_PACK"
    """STRICT_PACK: a pool's entry is on one node, or the job fails; PACK: near each other where they can be."""


class RayConfig(Section):
    start_timeout_s: int = Field(300, ge=1)
    """Seconds in which all nodes must be in the cluster, and all workers must have started."""
    dashboard: bool = False
    """Start Ray's dashboard, on the first node's loopback; the log says how to reach it."""
    object_store_gb: float | None = Field(None, gt=0)
    """Shared memory for Ray's objects on each node, in 10^9 bytes; 30 % of the node's memory grant where null."""
    first_port: int | None = Field(None, ge=1024, le=65024)
    """First of the 512 ports that Ray uses on each node, for sites with a firewall; free ones by the job's id where
    null."""

    @property
    def object_store_bytes(self) -> int | None:
        return None if self.object_store_gb is None else int(self.object_store_gb * 10**9)


class RayKwargs(Section):
    ray_init: dict[str, Any] = {}
    """Arguments of ray.init; of these, num_cpus lowers the CPUs that Ray may use on each node."""
    timeline_json_file: Path | None = None
    """Write Ray's timeline of all tasks here at the end, for chrome://tracing or Perfetto."""

    @field_validator("ray_init")
    @classmethod
    def _whole_cpus(cls, value: dict[str, Any]) -> dict[str, Any]:
        cpus = value.get("num_cpus")
        if cpus is not None and (not isinstance(cpus, int) or cpus < 1):
            raise ValueError(f"num_cpus is {cpus!r}, and has to be a number of CPUs, at least 1")
        return value

    @property
    def num_cpus(self) -> int | None:
        """Most CPUs that Ray may use on a node."""
        found: int | None = self.ray_init.get("num_cpus")
        return found


class RayJobConfig(JobConfig):
    """`submit ray`: any program on a Ray cluster inside the job."""

    ray: RayConfig = RayConfig()
    ray_kwargs: RayKwargs = RayKwargs()


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


SCHEMAS: dict[str, type[JobConfig]] = {
    "sft": SftConfig,
    "ppo": PpoConfig,
    "torchrun": JobConfig,
    "ray": RayJobConfig,
    "doctor": RayJobConfig,
}
