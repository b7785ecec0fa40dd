"""Where the Python processes of this package look for modules.

By default a Python process looks into its working folder, or the folder of its script, before the standard library. In
a job this is the folder in which the user has submitted it, and a file such as `inspect.py` there would replace
Python's module in every process. So processes of this package start with `-P`. Those that import modules which users
name (reward functions, environments, tools) look into that folder too, but last.

Programs of the user (`submit torchrun`, `submit ray`, `agent.command`) have Python's own rules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ENV_SAFE = "PYTHONSAFEPATH"
"""Python's variable with the meaning of -P (any text but an empty one), for the children of libraries too."""
ENV_LAST = "HPC_RL_LOOK_LAST"
"""Folders that a process looks into last: those of the process that started it."""
_OURS = "set-by-hpc-rl"
_LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables in which an empty entry means the working folder."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package or of a library with this Python."""
    return [sys.executable, "-P", "-m", module, *arguments]


def safe_variables() -> dict[str, str]:
    """Return variables for a process whose children are this package's or of libraries, and not programs of the user.

    Ray, and libraries that start Python with multiprocessing, give their processes no -P.
    """
    return {ENV_SAFE: os.environ.get(ENV_SAFE, _OURS)}


def users_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which programs of the user start as they do in a shell."""
    return {name: value for name, value in environ.items() if (name, value) != (ENV_SAFE, _OURS)}


def look_last_variables() -> dict[str, str]:
    """Return variables with which a child that calls `look_last` finds what this process finds."""
    folders = [str(Path(folder).absolute()) for folder in (*sys.path, "")]
    return {ENV_LAST: os.pathsep.join(dict.fromkeys(folders))}


def look_last() -> None:
    """Let this process find modules in the folders of its parent and in the working folder, after all others."""
    folders = os.environ.pop(ENV_LAST, "").split(os.pathsep)
    sys.path += [folder for folder in dict.fromkeys(folders) if folder and folder not in sys.path]


def without_empty_entries(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with lists of folders in which an empty entry is left out, as in `:/opt/lib`.

    Each program would look into its working folder there: Python and the dynamic linker among them.
    """
    found = {name: environ[name].split(os.pathsep) for name in _LISTS if name in environ}
    return {name: os.pathsep.join(filter(None, entries)) for name, entries in found.items() if "" in entries}
