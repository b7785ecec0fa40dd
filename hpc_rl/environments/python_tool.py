"""A tool with which a model runs Python programs: `hpc_rl.environments.python_tool:Python`."""

from __future__ import annotations

from typing import Any

from hpc_rl.environments.sandbox import Limits, ProgramResult, Sandbox

SAVE_AND_RUN = 'cat > /tmp/.program && exec "$@" /tmp/.program < /dev/null'
"""The program arrives on standard input, because the length of a command is limited, and then has an empty one."""


class Python:
    """Each call is a new program: no file and no variable of an earlier one is left.

    Args:
        runner, image: see Sandbox.
        python: Python in the image.
        limits: fields of Limits.
    """

    def __init__(self, runner: str = "auto", image: str | None = None, python: str = "python3", **limits: Any) -> None:
        self._sandbox = Sandbox(runner, image, Limits(**limits))
        self._python = python

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints. Files and variables of earlier calls are not available.

        Args:
            code: The program. Use print to show results.
        """
        return report(self._sandbox.run(["/bin/sh", "-c", SAVE_AND_RUN, "sh", self._python, "-I", "-u"], code))


def report(ran: ProgramResult) -> str:
    """Return the output of a program with a note about its end, as the model sees it."""
    if ran.ended_by is not None:
        note = f"[ended: it used {ran.ended_by}]"
    elif ran.code:
        note = f"[exit code {ran.code}]"
    else:
        return ran.output or "[no output]"
    return f"{ran.output.rstrip()}\n{note}".lstrip("\n")
