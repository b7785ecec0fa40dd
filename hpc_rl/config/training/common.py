"""Options of every training loop: the model, the optimizer, checkpoints and loggers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, field_validator

from hpc_rl.config.base import Path, Section
from hpc_rl.config.job import TrainerConfig
from hpc_rl.config.training.moments import Moments

Sharding = Literal["full", "hybrid", "gradients", "none"]
Offload = Literal["none", "optimizer", "all"]
Recompute = Literal[False, True, "half"]
Compile = Literal["auto", False, True]
Beta = Annotated[float, Field(ge=0, lt=1)]
OFFLOAD_BYTES = 1 << 30
"""Bytes of the moments that come to the device at a time if they wait in host memory; two such parts are there."""
MOST_PROFILED = 10
"""Largest number of steps of trainer.profile_steps."""
_TOKENS = TypeAdapter(Annotated[int, Field(ge=2)])


def _auto_or_tokens(value: Any) -> Any:
    if value == "auto":
        return value
    try:
        return _TOKENS.validate_python(value)
    except ValidationError:
        raise ValueError(f"expected auto, or a whole number of at least 2, found {value!r}") from None


MicroTokens = Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_tokens)]


class LoraConfig(Section):
    """Low-rank adapters. Without rank and path, all weights are trained."""

    rank: int | None = Field(None, ge=1)
    """Rank of the adapters (LoRA): only these are trained. null: all weights of the model are trained."""
    alpha: float | None = Field(None, gt=0)
    """The adapters' output is multiplied by alpha / rank. null: twice the rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapters' inputs. It has to be 0 in DPO and reinforcement learning."""
    target_modules: list[str] = []
    """Names of the linear layers that get an adapter, such as [q_proj,v_proj]. Empty: all linear layers of the
    transformer blocks."""
    path: Path | None = None
    """Continue from the adapters in this folder, in the format of peft. Rank, alpha and layers are those of the
    folder."""
    quantize: Literal["nf4"] | None = None
    """nf4: keep the frozen weights of the transformer blocks' linear layers in 4 bits (QLoRA), on GPUs. Each GPU holds
    all of them. It needs bitsandbytes. null: in model.dtype."""
    merge: bool = True
    """Export the model with the adapters merged into its weights. false: export a folder with the adapters only, in the
    format of peft."""

    @property
    def is_used(self) -> bool:
        """Whether adapters are trained instead of the whole model."""
        return self.rank is not None or self.path is not None

    @property
    def alpha_of_new(self) -> float:
        """Alpha of adapters that do not come from a folder."""
        assert self.rank is not None
        return 2.0 * self.rank if self.alpha is None else self.alpha

    def problems(self) -> Iterator[str]:
        changed = [name for name in type(self).model_fields if self._is_changed(name)]
        if not self.is_used and changed:
            yield f"{changed[0]} has no effect without adapters: set rank, or remove {' and '.join(changed)}"
        own = [name for name in ("rank", "alpha", "target_modules") if name in changed]
        if self.path is not None and own:
            yield f"path {self.path}: these adapters have their own {own[0]}; remove {' and '.join(own)}"


class ModelSource(Section):
    """Where a model comes from. Jobs that train it have further options."""

    path: Path
    """Folder of a Hugging Face model, or the name of a model on the hub."""
    tokenizer_path: Path | None = None
    """Folder or hub name of the tokenizer. null: the tokenizer of model.path."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository."""

    def in_dtype(self, dtype: str) -> ModelConfig:
        """Return the options of the same model, with weights of this type, and without adapters."""
        return ModelConfig.model_validate({**self.model_dump(exclude={"lora"}), "dtype": dtype})


class ModelConfig(ModelSource):
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights. GPUs compute in bfloat16 in both cases."""
    enable_gradient_checkpointing: Recompute = False
    """Recompute layers in the backward pass instead of keeping their activations. true: every layer, which takes about
    a third more time and far less memory. half: every second layer, which takes half of this extra time and saves
    about half of this memory."""
    enable_activation_offload: bool = False
    """Keep the inputs of recomputed layers in host memory between forward and backward pass, for long rows. They are
    copied while the GPU computes. It needs enable_gradient_checkpointing=true."""
    use_torch_compile: Compile = "auto"
    """Compile each transformer layer with torch.compile. auto: on GPUs, for models of type gemma2, llama, mistral,
    qwen2 and qwen3, unless use_liger, enable_activation_offload or lora.quantize is set, or the compiler fails."""
    use_liger: bool = False
    """Compute norms, rotary embeddings and gated activations with the kernels of Liger, on GPUs. It needs
    liger-kernel."""
    lora: LoraConfig = LoraConfig()

    @field_validator("enable_gradient_checkpointing", "use_torch_compile", mode="before")
    @classmethod
    def _true_or_false(cls, value: Any) -> Any:
        """Read a word as pydantic reads those of other switches, such as true, True, yes or 1."""
        try:
            return TypeAdapter(bool).validate_python(value) if isinstance(value, str) else value
        except ValidationError:
            return value

    def restricted(self) -> Iterator[str]:
        """Yield the names of the options in use that some models do not have, of formats/model_options.py."""
        used = {
            "adapters": self.lora.is_used,
            "4 bits": self.lora.quantize is not None,
            "recomputation": self.enable_gradient_checkpointing is not False,
        }
        yield from (name for name, is_used in used.items() if is_used)

    def problems(self) -> Iterator[str]:
        if self.enable_activation_offload and self.enable_gradient_checkpointing is not True:
            yield (
                "enable_activation_offload moves the inputs of recomputed layers to host memory, and "
                f"enable_gradient_checkpointing is {str(self.enable_gradient_checkpointing).lower()}: set it to true, "
                "or remove enable_activation_offload"
            )
        if self.use_liger and self.use_torch_compile is True:
            yield "use_liger and use_torch_compile both fuse the operations of a layer: set one of them to false"


class OptimConfig(Section):
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment, each at least 0 and below 1."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's decoupled weight decay. It does not apply to norms and biases."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global norm of the gradient; larger gradients are scaled down to it. 0: no clipping."""
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    """Fraction of all steps in which the learning rate rises linearly. The first of W such steps has 1/(W+1) of the
    peak."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end of the cosine and linear schedules, as a fraction of the peak."""
    moments: Moments = "float32"
    """How AdamW's two moments are stored. float32: in the type of the trained weights. 8bit: in 8 bits with a scale for
    each block of up to 256 values, which saves nearly 6 bytes per parameter and changes the result slightly. It needs
    torchao."""


_OTHER_LOGGERS = ("tensorboard", "mlflow", "swanlab", "comet", "neptune", "clearml", "csv", "file", "json", "trackio")


def _known_loggers(value: Any) -> Any:
    """Return the value. Raises ValueError for loggers of other tools, which names what exists."""
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and (other := next((name for name in names if name in _OTHER_LOGGERS), None)):
        raise ValueError(
            f"there is no logger {other}: choose 'console' or 'wandb', or both. Every run writes metrics.jsonl: hpc-rl "
            "metrics RUN --csv prints it as a table, hpc-rl watch RUN and hpc-rl report RUN draw it"
        )
    return value


class RecordedConfig(TrainerConfig):
    """Options of every program of this project that makes progress and records it."""

    hang_timeout_s: float = Field(900, ge=0)
    """If a process has no heartbeat for this many seconds, the job ends and is queued again once. The limit is
    four times as long for loading, saving, generation, validation, export and the first step. 0: no limit."""
    seed: int = Field(1, ge=0, le=2**63 - 1)
    """Random seed, also of the order of the data."""
    logger: Annotated[list[Literal["console", "wandb"]], BeforeValidator(_known_loggers)] = ["console"]
    """Additional destinations of metrics. metrics.jsonl in the run directory is always written."""
    project_name: str = "hpc-rl"
    """Name of the project in wandb."""
    experiment_name: str | None = None
    """Name of the run in wandb. null: the name of the run directory."""
    wandb_mode: Literal["online", "offline"] | None = None
    """offline: wandb writes into the run directory, and `hpc-rl wandb sync` uploads later. null: offline if
    cache.offline is set, otherwise online."""
    wandb_proxy: str | None = None
    """HTTP proxy for wandb only."""


class TrainingConfig(RecordedConfig):
    """Options of every training loop of this project."""

    total_epochs: int = Field(1, ge=1)
    """Passes over the training data."""
    total_training_steps: int | None = Field(None, ge=1)
    """Number of training steps, instead of total_epochs. null: as many as total_epochs has."""
    micro_tokens: MicroTokens = "auto"
    """Largest number of tokens in one forward and backward pass on one rank. This setting determines memory use and
    speed, not the result. auto, on GPUs: the largest of 1,024, 2,048, 4,096 to 32,768 that fits according to the plan
    of the job, but no more than a rank's part of a batch needs; the measured memory of the first step corrects the
    number. auto, on CPUs: 4,096. In both cases, auto is more if the longest sample needs more."""
    packing: bool = True
    """Pack several samples into one micro-batch of at most micro_tokens tokens. false: one sample, or one pair, per
    micro-batch, which the model computes as transformers does. This is slower if samples are short, and also exact for
    models whose packed rows would not be."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of neighbouring ranks that compute a packed row together, for samples that are too long for one GPU. Each
    rank has a slice of the row, which has up to sequence_parallel x micro_tokens tokens. The number has to divide the
    ranks of a node and the query heads of the model. 1: every rank computes rows of its own."""
    sharding: Literal["auto", Sharding] = "auto"
    """Sharding of the model with FSDP. full: parameters, gradients and optimizer state are divided among all ranks.
    hybrid: they are divided among the ranks of each node, and every node has the whole model (less traffic between
    nodes). gradients: parameters stay gathered from forward to backward, and gradients are whole until the end of the
    step. none: every rank has the whole model; a single rank then needs no FSDP. auto: hybrid, or none for a single
    GPU, if a model's parameters, gradients and optimizer state take at most a quarter of the memory of one node's GPUs,
    otherwise full."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which ranks add up gradients. bfloat16 halves this traffic and loses precision. It needs sharding auto,
    full or hybrid."""
    offload: Offload = "none"
    """State that is kept in host memory while it is not used, to save GPU memory. none: nothing. optimizer: the moments
    of AdamW, which are copied to the GPU in parts for each optimizer step. all (reinforcement learning only): also the
    weights of each model while engines generate or other models compute. The copies take time and host memory."""
    save_freq: int = Field(0, ge=0)
    """Save a checkpoint every N steps. 0: by time (save_minutes), at the end, and before the walltime."""
    save_minutes: float = Field(30, ge=0)
    """Save a checkpoint if the last one is older than this many minutes. 0: never by time."""
    max_ckpt_to_keep: int = Field(2, ge=1)
    """Number of checkpoints to keep; older ones are deleted."""
    test_freq: int = Field(0, ge=0)
    """Validate every N steps. 0: only at the end. Without data.val_files there is no validation."""
    save_async: bool = True
    """Continue training while a checkpoint is written. This needs host memory for a copy of the weights and of the
    optimizer's state. false: wait until each checkpoint is complete."""
    profile_steps: list[int] = []
    """Steps of which torch's profiler writes a trace, one file per rank in `profiles/` of the run directory: [3,4] or
    10-12. Each file has tens of MB, so at most 10 steps. Profiled steps are slower."""
    export: bool = True
    """Write the Hugging Face folder `model/` into the run directory at the end of training."""
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights in the exported model. null: the type in which the device computes, which is bfloat16 on
    GPUs and model.dtype on CPUs."""

    @property
    def row_tokens(self) -> int:
        """The largest number of tokens of a packed row. A job replaces auto by a number first."""
        assert self.micro_tokens != "auto"
        return self.sequence_parallel * self.micro_tokens

    def holds(self, longest: int) -> bool:
        """Return whether a row can hold a sample of this many tokens."""
        return not self.packing or self.micro_tokens == "auto" or longest <= self.row_tokens

    def problems(self) -> Iterator[str]:
        if not self.packing and self.sequence_parallel > 1:
            yield (
                f"trainer.sequence_parallel={self.sequence_parallel} divides packed rows among ranks, and "
                "trainer.packing=false computes each sample as a whole: remove one of them"
            )
        if self.reduce_dtype == "bfloat16" and self.sharding in ("gradients", "none"):
            yield (
                f"trainer.reduce_dtype=bfloat16 with trainer.sharding={self.sharding} would also add up micro-batches "
                "in bfloat16: use trainer.sharding=full or hybrid, or reduce_dtype=float32"
            )

    @field_validator("profile_steps", mode="before")
    @classmethod
    def _steps_of_a_range(cls, value: Any) -> Any:
        if isinstance(value, str) and (match := re.fullmatch(r"(\d+)-(\d+)", value)):
            first, last = int(match[1]), int(match[2])
            if not 0 <= last - first < MOST_PROFILED:
                raise ValueError(f"{value} is not a range of 1 to {MOST_PROFILED} steps, such as 10-12")
            return list(range(first, last + 1))
        return [value] if isinstance(value, int) else value

    @field_validator("profile_steps")
    @classmethod
    def _few_steps(cls, value: list[int]) -> list[int]:
        if len(value) > MOST_PROFILED or min(value, default=1) < 1:
            raise ValueError(f"write 1 to {MOST_PROFILED} steps, counted from 1, such as [3,4] or 10-12")
        return value


def recomputed_layers(recompute: Recompute, layers: int) -> range:
    """Return the numbers of the layers that are computed again in the backward pass.

    If the number of layers is even, half leaves out the last one: its activations are freed before any layer is
    computed again.

    Args:
        recompute: model.enable_gradient_checkpointing.
    """
    return range(0, layers if recompute else 0, 2 if recompute == "half" else 1)


def row_limit(trainer: TrainingConfig) -> str:
    """Return the largest number of tokens of a packed row, with the options that determine it, for a message."""
    if trainer.sequence_parallel == 1:
        return f"trainer.micro_tokens {trainer.micro_tokens}"
    return (
        f"{trainer.row_tokens} (trainer.sequence_parallel {trainer.sequence_parallel} x trainer.micro_tokens "
        f"{trainer.micro_tokens})"
    )


def gpu_problems(model: ModelConfig, trainer: TrainerConfig) -> Iterator[str]:
    """Yield a message for each option that needs another device than the job's, or packed rows."""
    if model.use_torch_compile is True and isinstance(trainer, TrainingConfig) and not trainer.packing:
        yield (
            "model.use_torch_compile=true compiles layers for packed rows, and trainer.packing=false computes one "
            "sample at a time: use model.use_torch_compile=auto, or remove trainer.packing"
        )
    needing = {
        f"model.lora.quantize={model.lora.quantize}": model.lora.quantize is not None,
        "model.use_liger=true": model.use_liger,
    }
    for option in (option for option, is_set in needing.items() if is_set and trainer.computes_on != "cuda"):
        yield (
            f"{option} needs GPUs of type cuda, and trainer.device is {trainer.device}: remove it, or set "
            "trainer.device=cuda"
        )
