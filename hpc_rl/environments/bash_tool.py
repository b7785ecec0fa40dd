"""A tool with which a model runs commands of a shell: `hpc_rl.environments.bash_tool:Bash`."""

from __future__ import annotations

from typing import Any

from hpc_rl.environments.python_tool import SAVE_AND_RUN, report
from hpc_rl.environments.sandbox import Limits, Sandbox


class Bash:
    """Each call is a new shell: no file and no variable of an earlier one is left.

    Args:
        runner, image: see Sandbox.
        limits: fields of Limits.
    """

    def __init__(self, runner: str = "auto", image: str | None = None, **limits: Any) -> None:
        self._sandbox = Sandbox(runner, image, Limits(**limits))

    def bash(self, command: str) -> str:
        """Run commands in bash and return what they print. Files and variables of earlier calls are not available.

        Args:
            command: One or more commands.
        """
        return report(self._sandbox.run(["/bin/sh", "-c", SAVE_AND_RUN, "sh", "bash"], command))
