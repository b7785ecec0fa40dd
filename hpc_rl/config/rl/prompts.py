"""The section `data` of reinforcement learning, and the options of prompts that `generate` and `eval` share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpc_rl.config.base import Files, Path, Section, Table
from hpc_rl.config.training.mixtures import TrainFiles


class PromptFiles(Section):
    train_files: TrainFiles
    """Training prompts: one or more data files (jsonl, json, csv, tsv or parquet), or the name of one data set on the
    hub (its train split). A table {FILE: WEIGHT, FILE: WEIGHT} sets the share of each file in an epoch."""
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
    chat_template_kwargs: Table = {}
    """Variables of the chat template, such as {enable_thinking: false}."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["drop", "truncate"] = "drop"
    """Treatment of prompts longer than max_prompt_length: leave them out, or keep only their end. The log counts
    them."""
    max_response_length: int = Field(512, ge=1)
    """Longest response, in tokens. In a conversation, all tokens after the prompt."""

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [self.prompt_key, *([] if self.answer_key is None else [self.answer_key])]

    @property
    def longest(self) -> int:
        """The largest number of tokens of a prompt with its response, which cannot be split among micro-batches."""
        return self.max_prompt_length + self.max_response_length


class PromptDataConfig(PromptConfig, PromptFiles):
    train_batch_size: int = Field(64, ge=1)
    """Prompts per step. The policy generates rollout.n responses to each of them."""
    shuffle: bool = True
    """Use a new random order in each epoch."""
