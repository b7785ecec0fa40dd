"""What a pool and its processes send each other. A process that runs worker.py could not share classes of that file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.environments.protocol import EpisodeResult, Message, Reply
from hpc_rl.environments.tool_calls import MalformedCall, ToolCall


@dataclass(frozen=True)
class EnvironmentSpec:
    """What a process loads."""

    environment: str | None
    kwargs: Mapping[str, Any]
    tools: Sequence[str]
    most_chars: int
    """Limit of the characters of a tool's output or an observation."""
    sandbox: str = "auto"
    """What runs the programs of the shipped tools; see load_definition."""


@dataclass(frozen=True)
class EnvironmentInfo:
    """What an environment and its tools offer."""

    schemas: list[dict[str, Any]]
    has_step: bool
    has_reward: bool


@dataclass(frozen=True)
class StartRequest:
    """The request for the first messages of a conversation."""

    prompt: list[Message]
    row: dict[str, Any]


@dataclass(frozen=True)
class AnswerRequest:
    """The request for an answer to a model's text, which has these tool calls."""

    text: str
    calls: list[ToolCall | MalformedCall]


@dataclass(frozen=True)
class FinishRequest:
    """The request for the reward of a conversation, which then ends."""


Request = StartRequest | AnswerRequest | FinishRequest


def failed(request: Request, reason: str) -> Reply | EpisodeResult:
    """Return the answer to a request about a conversation that has failed."""
    return EpisodeResult(None, error=reason) if isinstance(request, FinishRequest) else Reply([], True, error=reason)
