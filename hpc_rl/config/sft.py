"""Options of supervised fine-tuning (`submit sft`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from hpc_rl.config.base import Files, Path, Section
from hpc_rl.config.job import JobConfig
from hpc_rl.config.training import ModelConfig, OptimConfig, TrainingConfig


class DataConfig(Section):
    train_files: Files
    """Training data: jsonl, json, csv, tsv or parquet files, or a `datasets` data set by its name (train split)."""
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


class SftTrainerConfig(TrainingConfig):
    packing: bool = True
    """Pack samples into micro-batches of at most micro_tokens tokens; false: one sample at a time."""


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
