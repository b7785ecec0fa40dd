"""Child processes that never outlive their owner."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

GRACE_S = 15.0
"""Between SIGTERM and SIGKILL: under Slurm's KillWait (30 s), so that the owner still gets to say what happened."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent is gone, however it went (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def start(
    argv: Sequence[str], environ: Mapping[str, str], output: IO[bytes], new_session: bool = False
) -> subprocess.Popen[bytes]:
    """Start a child that writes to `output` and dies with this process.

    Args:
        new_session: keep the terminal's Ctrl-C from the child, whose owner decides what it means.
    """
    return subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=die_with_parent,
        start_new_session=new_session,
    )


def forward_termination(child: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> threading.Event:
    """Hand SIGTERM and SIGINT on to the child as SIGTERM, and as SIGKILL after `grace_s`.

    Returns:
        set once such a signal came; this process ends when the child has.
    """
    asked = threading.Event()

    def hand_on(_number: int, _frame: FrameType | None) -> None:
        child.terminate()
        if not asked.is_set():
            asked.set()
            last_word = threading.Timer(grace_s, child.kill)
            last_word.daemon = True
            last_word.start()

    signal.signal(signal.SIGTERM, hand_on)
    signal.signal(signal.SIGINT, hand_on)
    return asked


def end(child: subprocess.Popen[bytes]) -> None:
    """End the child: SIGTERM, then SIGKILL after GRACE_S."""
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def shell_code(returncode: int) -> int:
    """The exit code as a shell shows it: 128 + n for a death by signal n."""
    return 128 - returncode if returncode < 0 else returncode


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log, indented; of a large one only the end is read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 200 * lines))
            found = log.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join("    " + line for line in found[-lines:])
