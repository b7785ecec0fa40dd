"""The section `environment` of reinforcement learning: conversations with several turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from hpc_rl.config.base import REPLACES_VARIABLES, Section, Table

TOOL_FORMATS = ("auto", "hermes", "json", "xml")
VLLM_FORMAT = "vllm:"
SHIPPED_TOOLS = ("python", "bash")
SANDBOXES = ("auto", "apptainer", "bwrap")


class ToolFormatConfig(Section):
    """What environments and agents share."""

    tool_format: str = "auto"
    """How the model writes a tool call: hermes, json, xml, or vllm:NAME for a parser of vLLM. auto: as the chat
    template describes it."""

    def format_problems(self, section: str) -> Iterator[str]:
        """Yield a message if there is no such format."""
        if self.tool_format not in TOOL_FORMATS and not self.tool_format.startswith(VLLM_FORMAT):
            yield (
                f"{section}.tool_format {self.tool_format}: choose one of {', '.join(TOOL_FORMATS)} or "
                f"{VLLM_FORMAT}NAME"
            )


class EnvironmentConfig(ToolFormatConfig):
    name: Annotated[str, REPLACES_VARIABLES] | None = None
    """Environment that answers the model, as package.module:Class or path/file.py:Class. Each public method of the
    class is a tool. null: no environment; without environment.tools, a response is then one turn of the model."""
    kwargs: Table = {}
    """Keyword arguments with which an environment is created for each conversation."""
    tools: list[Annotated[str, REPLACES_VARIABLES, Field(min_length=1)]] = []
    """Functions that the model may call, as package.module:function or path/file.py:function. python and bash run
    programs of the model in a sandbox."""
    max_turns: int = Field(8, ge=1)
    """Largest number of turns of the model in a conversation. Tool calls of the last turn are made, but the model does
    not see their results."""
    workers: int = Field(4, ge=1)
    """Number of processes on each node that run environments and tools. Each makes one call at a time."""
    timeout_s: float = Field(60, gt=0)
    """Longest time in seconds of a call. A process that takes longer is ended, and its conversations have no score."""
    max_output_chars: int = Field(10_000, ge=100)
    """Longest result of a tool or an environment, in characters. Longer results lose their middle."""
    sandbox: Annotated[str, REPLACES_VARIABLES] = "auto"
    """What runs the programs of the tools python and bash: apptainer, bwrap, or with a root file system
    apptainer:IMAGE or bwrap:FOLDER. auto: the first of the two that is installed, with the system folders of the
    node."""

    @property
    def is_used(self) -> bool:
        """Whether responses are conversations."""
        return self.name is not None or bool(self.tools)

    def problems(self) -> Iterator[str]:
        if not self.is_used:
            changed = [name for name in type(self).model_fields if self._is_changed(name)]
            yield from (
                f"environment.{name} has no effect without an environment: set environment.name or environment.tools, "
                "or remove it"
                for name in changed
            )
            return
        if self.kwargs and self.name is None:
            yield "environment.kwargs are arguments of an environment: set environment.name, or remove them"
        if len({*self.tools}) < len(self.tools):
            yield f"environment.tools [{', '.join(self.tools)}] has a name twice: name each tool once"
        yield from self.format_problems("environment")
        runner, colon, image = self.sandbox.partition(":")
        if runner not in SANDBOXES or (colon and not image):
            yield (
                f"environment.sandbox {self.sandbox}: choose one of {', '.join(SANDBOXES)}, or add a root file system, "
                "as in apptainer:/images/python.sif"
            )
        elif self._is_changed("sandbox") and not {*SHIPPED_TOOLS} & {*self.tools}:
            yield (
                f"environment.sandbox is for the tools {' and '.join(SHIPPED_TOOLS)}: add one of them to "
                "environment.tools, or remove it"
            )
