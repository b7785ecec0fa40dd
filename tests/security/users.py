"""Two ordinary users of this machine: VICTIM runs the commands of hpc-rl, INTRUDER plants what they read. Root becomes both.

The repository and this Python may lie in a folder that only root can enter, such as /root/.pyenv. The programs of both users
then see it in a mount namespace of their own, in which nothing else of that folder exists.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

VICTIM, INTRUDER = 64241, 64242
"""User ids that nobody has."""
REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 120
"""For one command, however busy the machine is: no command waits for what another user has planted."""


def as_ordinary(uid: int, *argv: str) -> list[str]:
    """Return the command with which root runs a program as an ordinary user, without groups and capabilities."""
    drop = [
        "setpriv",
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "--bounding-set=-all",
        "--no-new-privs",
        *argv,
    ]
    return ["unshare", "--mount", "sh", "-euc", "\n".join([*_openings(), "exec " + shlex.join(drop)])]


def hpc_rl(uid: int, *words: str) -> list[str]:
    """Return the command with which an ordinary user calls hpc-rl."""
    return as_ordinary(uid, sys.executable, "-P", "-m", "hpc_rl.cli", *words)


def run(
    uid: int, argv: list[str], home: Path, *, folder: Path | None = None, deadline_s: float = DEADLINE_S, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that `as_ordinary` or `hpc_rl` made, with a home and, unless another is named, in it."""
    return subprocess.run(
        argv, cwd=folder or home, env=environment(home, environ), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors="replace", timeout=deadline_s, check=False,
    )  # fmt: skip


def environment(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an ordinary user's shell."""
    own = {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "LANG": "C.UTF-8"}
    libraries = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    return {**own, **libraries, **more}


def _openings() -> Iterator[str]:
    """Yield the lines of shell that open what this Python needs below folders that only root can enter."""
    needed = {Path(place).resolve() for place in (sys.base_prefix, sys.prefix, REPOSITORY)}
    hidden = {str(path): str(folder) for path in sorted(needed) if (folder := _closed(path))}
    if not hidden:
        return
    yield "mount --make-rprivate /; mount -t tmpfs none /mnt"
    for number, path in enumerate(hidden):
        yield f"mkdir /mnt/{number}; mount --bind {shlex.quote(path)} /mnt/{number}"
    for folder in set(hidden.values()):
        yield f"mount -t tmpfs -o mode=755 none {shlex.quote(folder)}"
    for number, path in enumerate(hidden):
        yield f"mkdir -p {shlex.quote(path)}; mount --bind /mnt/{number} {shlex.quote(path)}"


def _closed(path: Path) -> Path | None:
    """Return the topmost folder on the way to a path that other users cannot enter."""
    return next((folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None)
