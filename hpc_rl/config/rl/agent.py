"""The section `agent` of reinforcement learning: conversations that programs of the user lead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from hpc_rl.config.rl.environment import ToolFormatConfig


class AgentConfig(ToolFormatConfig):
    endpoint: Literal["loopback", "network"] | None = None
    """Serve the policy to agents, whose conversations with it are the responses. loopback: to agents on the first node;
    network: on the network between the nodes too. null: responses are not written with agents."""
    command: list[Annotated[str, Field(min_length=1)]] = []
    """Program and arguments of an agent that the run starts on the first node, with the endpoint in OPENAI_BASE_URL and
    OPENAI_API_KEY. Empty: agents are started in another way."""
    processes: int = Field(1, ge=1)
    """Number of processes of agent.command."""
    timeout_s: float = Field(600, gt=0)
    """Time limit in seconds of a session. The time in which it waits for the policy does not count. A session that
    takes longer has no score. If no agent sends a request for this time, sessions that are not taken have no score."""

    @property
    def is_used(self) -> bool:
        """Whether agents lead the conversations."""
        return self.endpoint is not None

    def problems(self) -> Iterator[str]:
        if not self.is_used:
            changed = [name for name in type(self).model_fields if self._is_changed(name)]
            yield from (
                f"agent.{name} has no effect without an endpoint: set agent.endpoint=loopback, or remove it"
                for name in changed
            )
            return
        yield from self.format_problems("agent")
        if self.processes > 1 and not self.command:
            yield (
                f"agent.processes is {self.processes}, but there is no agent.command to start: set it, or remove "
                "agent.processes"
            )
