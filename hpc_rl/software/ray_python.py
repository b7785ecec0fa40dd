"""The Python that Ray starts workers with.

Ray gives its path to bash without quotes (ray/_private/runtime_env/context.py). With a space in it, no worker would
start, and the job would wait for them.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def without_spaces(folder: Path) -> str:
    """Return a path of this Python without spaces, for the processes that Ray's own ones start.

    Args:
        folder: one without spaces in its path, for a link to the environment of this Python.
    """
    if not any(map(str.isspace, sys.executable)):
        return sys.executable
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    link, python = folder / "python", Path(sys.executable)
    link.symlink_to(python.parents[1])  # Python looks for its environment beside bin
    return str(link / python.parent.name / python.name)


def quoted_python() -> dict[str, str]:
    """Return a runtime environment with this Python, for a cluster that `ray.init` starts; empty if Ray needs none."""
    quoted = shlex.quote(sys.executable)
    return {} if quoted == sys.executable else {"py_executable": quoted}
