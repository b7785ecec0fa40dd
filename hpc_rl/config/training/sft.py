"""Options of supervised fine-tuning (`submit sft`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from hpc_rl.config.training.finetune import FinetuneConfig, FinetuneDataConfig


class DataConfig(FinetuneDataConfig):
    messages_key: str = "messages"
    """Column with chat messages (role, content). Ignored if prompt_key and response_key are set."""
    prompt_key: str | None = None
    """Column with the prompt as text. Set it together with response_key, instead of messages_key."""
    response_key: str | None = None
    """Column with the response as text. Set it together with prompt_key."""
    truncation: Literal["truncate", "drop"] = "truncate"
    """Treatment of samples longer than max_length: cut off their end, or leave them out. The log counts them."""

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        if self.prompt_key is not None and self.response_key is not None:
            return [self.prompt_key, self.response_key]
        return [self.messages_key]

    def problems(self) -> Iterator[str]:
        if (self.prompt_key is None) != (self.response_key is None):
            yield "prompt_key and response_key belong together: set both, or neither (then messages_key is used)"


class SftConfig(FinetuneConfig):
    data: DataConfig
