"""Options of supervised fine-tuning (`submit sft`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from hpc_rl.config.base import Files, Path, Section, SomeFiles
from hpc_rl.config.job import JobConfig
from hpc_rl.config.training import ModelConfig, OptimConfig, TrainingConfig


class DataConfig(Section):
    train_files: SomeFiles
    """Training data: one or more data files (jsonl, json, csv, tsv or parquet), or the name of one data set on the hub
    (its train split)."""
    val_files: Files = []
    """Validation data, in the same forms (of a data set on the hub, its test split). Empty: no validation."""
    messages_key: str = "messages"
    """Column with chat messages (role, content). Ignored if prompt_key and response_key are set."""
    prompt_key: str | None = None
    """Column with the prompt as text. Set it together with response_key, instead of messages_key."""
    response_key: str | None = None
    """Column with the response as text. Set it together with prompt_key."""
    chat_template: Path | None = None
    """File with a Jinja chat template that replaces the tokenizer's. null: the tokenizer's own template."""
    max_length: int = Field(1024, ge=2)
    """Longest sample, in tokens."""
    truncation: Literal["truncate", "drop"] = "truncate"
    """Treatment of samples longer than max_length: cut off their end, or leave them out. The log counts them."""
    train_batch_size: int = Field(64, ge=1)
    """Samples per optimizer step, over all ranks."""
    shuffle: bool = True
    """Use a new random order in each epoch. The order does not depend on the number of ranks."""

    def problems(self) -> Iterator[str]:
        if (self.prompt_key is None) != (self.response_key is None):
            yield "prompt_key and response_key belong together: set both, or neither (then messages_key is used)"


class SftTrainerConfig(TrainingConfig):
    packing: bool = True
    """Pack several samples into one micro-batch of at most micro_tokens tokens. false: one sample per micro-batch."""


class SftConfig(JobConfig):
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig = OptimConfig()
    trainer: SftTrainerConfig = SftTrainerConfig()

    def problems(self) -> Iterator[str]:
        if self.data.max_length > self.trainer.micro_tokens:
            yield (
                f"data.max_length {self.data.max_length} exceeds trainer.micro_tokens {self.trainer.micro_tokens}: "
                "a sample is never split, so raise micro_tokens or lower max_length"
            )
