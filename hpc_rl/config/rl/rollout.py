"""The section `rollout`: engines and sampling, for reinforcement learning, `generate` and `eval`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

from pydantic import Field

from hpc_rl.config.base import Section, Table
from hpc_rl.config.rl.engines import ENGINES, EngineName, EngineSpec, default_engine
from hpc_rl.config.rl.pools import PooledJob, PooledTrainer, pool_of, pool_spec, slot_unit
from hpc_rl.config.rl.prompts import PromptConfig
from hpc_rl.config.training.common import ModelSource
from hpc_rl.system.accelerators import DeviceName

SHARED_GPU, OWN_GPU = 0.5, 0.9
"""Part of a GPU's memory that an engine takes by default: next to training workers, and alone."""


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
            yield (
                f"rollout.val.n is {self.n}, but at rollout.val.temperature=0 all responses are the same: raise the "
                "temperature, or set rollout.val.n=1"
            )
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
    """Number of GPUs over which one vllm engine splits the model. It has to divide the GPUs per node (in `submit ppo`,
    those of the rollout pool)."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of each GPU's memory that vllm uses, or that sglang uses for weights and cache. null: 0.9 (in sglang,
    its own choice), or 0.5 on GPUs that training workers use too."""
    max_num_seqs: int = Field(256, ge=1)
    """Largest number of responses that one engine generates at the same time."""
    stall_s: float = Field(600, gt=0)
    """An engine that does not answer for so many seconds is ended and started again."""
    engine_kwargs: Table = {}
    """Additional arguments of vllm.LLM, such as disable_cascade_attn, or of the server of sglang, such as
    attention_backend."""


class RolloutConfig(EngineConfig):
    val: ValSamplingConfig = ValSamplingConfig()
    engines: Literal["own", "lent"] = "own"
    """Which engines generate. own: those of the job, and those that other jobs lend (`hpc-rl lend`). lent: the job has
    none of its own, and waits for lenders."""
    lent_stall_s: float = Field(60, gt=0)
    """A lent engine that does not answer for so many seconds is ended, and others repeat its requests."""
    staleness: int = Field(0, ge=0)
    """Largest number of steps by which responses may be older than the step that trains on them. 0: a step generates
    its responses with its own weights. 1: the responses of the next step are generated while a step is trained. With
    more, the engines may be further ahead. Engines need a pool of their own for it."""
    partial: bool = False
    """Continue unfinished responses with new weights. false: engines finish them before they take new weights."""
    calculate_log_probs: bool = False
    """Measure how much the engine's probabilities differ from the trainer's (training/rollout_probs_diff_*). They are
    not compared if a correction (algorithm.tis_*) is used with top_p or top_k, because they differ anyway then."""
    merge_lora: bool = True
    """Send engines the weights with the policy's adapters (model.lora) merged into them. false: send the adapters only,
    and let the engines compute with them beside the model's own weights. rollout.name=vllm supports this."""
    sync_bucket_mb: int = Field(256, ge=1)
    """Size of the buckets in which new weights are sent to the engine, in 10^6 bytes."""


class EngineTrainer(PooledTrainer, Protocol):
    """What an engine reads of the section `trainer`."""

    @property
    def seed(self) -> int: ...
    @property
    def computes_on(self) -> DeviceName: ...
    @property
    def model_timeout_s(self) -> int: ...


class EngineJob(PooledJob, Protocol):
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


def engine_problems(config: EngineJob) -> Iterator[str]:
    """Yield a message for each option of the engines that cannot work."""
    device, parallel = config.trainer.computes_on, config.rollout.tensor_parallel_size
    engine = engine_name(config.rollout, device)
    if device not in ENGINES[engine].dtypes:
        yield (
            f"rollout.name {engine} does not support trainer.device={device}: use "
            f"rollout.name={default_engine(device)}, or trainer.device={' or '.join(ENGINES[engine].dtypes)}"
        )
    if config.truncates_logprobs and not ENGINES[engine].truncates:
        able = " or ".join(name for name, each in ENGINES.items() if each.truncates)
        yield (
            f"rollout.top_p or top_k with a correction (algorithm.tis_*): the correction needs the probabilities after "
            f"top_p and top_k, and rollout.name={engine} reports those before them; set rollout.name={able}, or remove "
            "one of the two"
        )
    yield from _argument_problems(config.rollout, engine)
    if parallel > 1 and not ENGINES[engine].tensor_parallel:
        able = " or ".join(name for name, each in ENGINES.items() if each.tensor_parallel)
        yield (
            f"rollout.tensor_parallel_size is {parallel}, which rollout.name={engine} does not support: "
            f"set rollout.name={able}, or rollout.tensor_parallel_size=1"
        )
        return
    if parallel > 1 and config.pools.strategy == "PACK":
        yield f"pools.strategy=PACK may place the {parallel} GPUs of an engine on several nodes: use STRICT_PACK"
    name = pool_of(config, "rollout")
    if odd := [n for n in pool_spec(config).get(name, []) if n % parallel]:
        yield (
            f"rollout.tensor_parallel_size {parallel} does not divide the {odd[0]} {slot_unit(config)} per node of "
            f"pool {name}: choose a number that does"
        )


def _argument_problems(rollout: EngineConfig, engine: str) -> Iterator[str]:
    spec, arguments = ENGINES[engine], _arguments(rollout)
    for name in (name for name in spec.own_arguments if name in arguments):
        yield (
            f"rollout.engine_kwargs.{name}={arguments[name]}: hpc-rl sets this argument of {engine} itself; remove it"
            + (", and set rollout.tensor_parallel_size" if name == "tensor_parallel_size" else "")
        )
    length = arguments.get("max_model_len", 1)
    if not isinstance(length, int) or length < 1:
        yield f"rollout.engine_kwargs.max_model_len={length}: expected a number of tokens; correct it, or remove it"
    for name in spec.one_only:
        if arguments.get(name, 1) not in (None, 1):
            yield (
                f"rollout.engine_kwargs.{name}={arguments[name]}: an engine of {engine} has "
                f"{rollout.tensor_parallel_size} of the job's GPUs (rollout.tensor_parallel_size), and no more are "
                "reserved for it: remove the argument; further GPUs of the pool get engines of their own"
            )


def _arguments(rollout: EngineConfig) -> dict[str, Any]:
    """Return rollout.engine_kwargs with names as in Python; those of a command line have hyphens."""
    return {name.replace("-", "_"): value for name, value in rollout.engine_kwargs.items()}


def sync_problems(config: EngineJob) -> Iterator[str]:
    """Yield a message for each reason why the engine cannot receive weights, which each step of reinforcement learning
    changes."""
    arguments = _arguments(config.rollout)
    for name in engine_spec(config).unsynced:
        if arguments.get(name) not in (None, False):
            yield (
                f"rollout.engine_kwargs.{name}={arguments[name]}: the engines need the policy's new weights in each "
                "step, and an engine with this argument cannot receive them: remove the argument (submit generate and "
                "eval can use it)"
            )
    if not engine_spec(config).transfers:
        able = " or ".join(name for name, each in ENGINES.items() if each.transfers)
        yield (
            f"rollout.name={engine_name(config.rollout, config.trainer.computes_on)}: each step changes the policy's "
            "weights, and a server that others operate does not take them, so that its responses would not be the "
            f"policy's; set rollout.name={able} (submit generate and eval can use such a server)"
        )


def engine_name(rollout: EngineConfig, device: str) -> str:
    """Return the name of the rollout engine; rollout.name=auto depends on the device."""
    return default_engine(device) if rollout.name == "auto" else rollout.name


def room(config: EngineJob) -> int:
    """Return the tokens of a prompt and its response for which the engines have room. Some rotary embeddings depend on
    it."""
    return int(_arguments(config.rollout).get("max_model_len", config.data.longest))


def engine_spec(config: EngineJob) -> EngineSpec:
    """Return the run's row of ENGINES."""
    return ENGINES[engine_name(config.rollout, config.trainer.computes_on)]


def engine_dtype(rollout: EngineConfig, device: str) -> str:
    """Return torch's name for the type of the engine's weights; rollout.dtype=auto depends on engine and device."""
    return ENGINES[engine_name(rollout, device)].dtypes[device] if rollout.dtype == "auto" else rollout.dtype
