"""Another user of the machine, who plants files where the user's commands and jobs will look."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.security.users import INTRUDER


def as_intruder(commands: str, environ: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run lines of bash as the intruder, in a folder. Return what they printed and their exit code."""
    return subprocess.run(
        ["bash", "-uc", commands],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **environ},
        user=INTRUDER,
        group=INTRUDER,
        extra_groups=[],
        umask=0,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Open sockets and files of this process, which is root's, as another user."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
