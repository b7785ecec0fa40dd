"""What a pool and its processes send each other. A process that runs worker.py could not share classes of that file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.environments.protocol import Message, Outcome, Reply
from hpc_rl.environments.tool_calls import Call, Malformed


@dataclass(frozen=True)
class Wanted:
    """What a process loads."""

    environment: str | None
    kwargs: Mapping[str, Any]
    tools: Sequence[str]
    most_chars: int
    """Limit of the characters of a tool's output or an observation."""
    sandbox: str = "auto"
    """What runs the programs of the shipped tools; see load_definition."""


@dataclass(frozen=True)
class Offered:
    """What an environment and its tools offer."""

    schemas: list[dict[str, Any]]
    has_step: bool
    has_reward: bool


@dataclass(frozen=True)
class Start:
    """The request for the first messages of a conversation."""

    prompt: list[Message]
    row: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The request for an answer to a model's text, which has these tool calls."""

    text: str
    calls: list[Call | Malformed]


@dataclass(frozen=True)
class Finish:
    """The request for the reward of a conversation, which then ends."""


Request = Start | Answer | Finish


def failed(request: Request, reason: str) -> Reply | Outcome:
    """Return the answer to a request about a conversation that has failed."""
    return Outcome(None, error=reason) if isinstance(request, Finish) else Reply([], True, error=reason)
