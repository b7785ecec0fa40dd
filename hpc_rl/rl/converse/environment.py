"""The environment of a run: its processes, and how its messages become tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpc_rl.data.prompts import Prompt
from hpc_rl.data.reading.rows import Message
from hpc_rl.environments.pool import Environments
from hpc_rl.environments.tool_calls import VLLM, MalformedCall, ToolCall, after_thinking, find_parser
from hpc_rl.environments.turns import Turns
from hpc_rl.environments.vllm_parsers import load_vllm_parser
from hpc_rl.errors import UserError
from hpc_rl.rl.converse.loop_thread import LoopThread
from hpc_rl.rl.rollout.engine import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hpc_rl.rl.actors.cluster import DriverConfig


class Environment:
    """The environment of a run: its processes, and how its messages become tokens.

    Args:
        tokenizer: with the run's chat template.
        processes: are closed with this, and if it cannot be created.

    Raises:
        UserError: the environment gives no reward and nothing else does, or the chat template does not fit
            conversations.
    """

    def __init__(self, config: DriverConfig, tokenizer: PreTrainedTokenizerBase, processes: Environments) -> None:
        self.processes = processes
        try:
            self._prepare(config, tokenizer)
        except UserError:
            self.processes.close()
            raise
        self.loop = LoopThread("conversations")
        """Where the conversations are."""

    def _prepare(self, config: DriverConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        own, offered = config.environment, self.processes.offered
        if config.needs_scores and not (offered.has_reward or offered.has_step or config.reward.sources):
            raise UserError(
                f"environment.name {own.name} has no method `reward`, and no reward is set: add the method, or set "
                "reward.function"
            )
        self.schemas = offered.schemas
        self._tokenizer = copy.deepcopy(tokenizer)  # other threads use the run's
        template = self._tokenizer.get_chat_template()
        self.roles = ["tool"] * bool(self.schemas) + ["user"] * offered.has_step
        self.turns = Turns(self._tokenizer, template, self.schemas, config.data.chat_template_kwargs, self.roles)
        if own.tool_format.startswith(VLLM):
            self._parse = load_vllm_parser(own.tool_format.removeprefix(VLLM), self._tokenizer, self.schemas)
        elif self.schemas:
            self._parse = find_parser(own.tool_format, template)

    def text(self, turn: Completion) -> str:
        """Return what the model wrote in a turn."""
        # Formats of tool calls have special tokens; the last token is the one that ends the turn.
        ids = turn.token_ids[:-1] if turn.finished else turn.token_ids
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def read(self, text: str) -> tuple[str, list[ToolCall | MalformedCall]]:
        """Return what the model wrote without its thinking, and its tool calls."""
        visible = after_thinking(text, self.turns.opens_thinking)
        return visible, self._parse(visible) if self.schemas else []

    def prompt_ids(self, prompt: Prompt, asked: Sequence[Message], first: Sequence[Message]) -> NDArray[np.int32]:
        """Return the prompt of a conversation.

        Args:
            asked: the messages of the prompt.
            first: these messages with what the environment has added.
        """
        if list(first) == list(asked):
            return prompt.token_ids
        return np.array(self.turns.prompt_ids(first), np.int32)

    def added_ids(self, turn: Completion, messages: Sequence[Message]) -> list[int]:
        """Return the ids between a turn and the next one.

        Raises:
            UserError: the messages do not fit the chat template.
        """
        if other := {str(message["role"]) for message in messages} - {*self.roles}:
            raise UserError(f"it returned a message of role {min(other)}; return {' or '.join(self.roles)}")
        return self.turns.added_ids(turn.token_ids.tolist(), messages)

    def close(self) -> None:
        """End the processes, and all conversations."""
        self.processes.close()
        self.loop.close()
