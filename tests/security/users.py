"""Two ordinary users of this machine: VICTIM runs the commands of hpc-rl, INTRUDER plants what they read.

Root becomes both. The repository and this Python may lie in a folder that only root can enter, such as /root/.pyenv.
Programs of both users then see it in a mount namespace of their own, in which nothing else of that folder exists.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

VICTIM, INTRUDER = 64241, 64242
"""User ids that nobody has."""
REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 120
"""For one command, however busy the machine is: no command waits for what another user has planted."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _PR_SET_DUMPABLE = 0x20000, 4
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")


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
        argv,
        cwd=folder or home,
        env=environment(home, environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=deadline_s,
        check=False,
    )


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int | None
    """None if it did not end in time."""
    out: str
    messages: str

    @property
    def text(self) -> str:
        return self.out + self.messages


class Terminal:
    """Commands of hpc-rl that an ordinary user calls, one after the other: see tests/security/served.py."""

    def __init__(self, uid: int, home: Path, **environ: str) -> None:
        argv = as_ordinary(uid, sys.executable, "-P", "-m", "tests.security.served")
        self._home = home
        self._server = subprocess.Popen(
            argv, env=environment(home, environ), cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate(timeout=DEADLINE_S)

    def hpc_rl(self, *words: str, folder: Path | None = None, deadline_s: float = DEADLINE_S) -> Done:
        """Call `hpc-rl WORDS` in a folder; the default is the home."""
        assert self._server.stdin and self._server.stdout
        request = {"words": words, "folder": str(folder or self._home), "deadline_s": deadline_s}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Done(**json.loads(self._server.stdout.readline()))


@contextmanager
def copy_of_this_process(uid: int, work: Callable[[], None], *, deadline_s: float) -> Iterator[int]:
    """Fork an ordinary user's process, yield its id, and then let it call a function, which has to return in time."""
    fork = multiprocessing.get_context("fork")
    may_work = fork.Event()

    def become_ordinary_and_work() -> None:
        if _LIBC.unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["sh", "-euc", "\n".join(_openings())], check=True, timeout=DEADLINE_S)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _LIBC.prctl(_PR_SET_DUMPABLE, 1)  # /proc/self is its own, as it is after a start
        may_work.wait()
        work()

    process = fork.Process(target=become_ordinary_and_work)
    process.start()
    try:
        assert process.pid is not None
        yield process.pid
        may_work.set()
        process.join(deadline_s)
        assert process.exitcode is not None, f"it is still waiting after {deadline_s:.0f} s"
        assert process.exitcode == 0, "it failed, see the captured output"
    finally:
        process.kill()
        process.join()


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
