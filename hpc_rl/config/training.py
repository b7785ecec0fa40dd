"""Options that every training loop has: the model, the optimizer, checkpoints and loggers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpc_rl.config.base import Path, Section
from hpc_rl.config.job import TrainerConfig


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
