"""Heartbeats: a process of a job records in a small file what it does, and each time that its work advances.

    heart.begin("rank 1")                # once; without a folder in HPC_RL_HEARTBEATS, nothing is recorded
    with heart.phase("save_checkpoint"):
        heart.beat()                     # after each part of the work

A beat comes from the work itself, and from no thread beside it, which would go on while the work hangs. The node entry
reads the files (`hpc_rl.node.hangs.watch`). They are on the node's own disk, and a beat is one write of one block.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hpc_rl.liveness import stacks

ENV_HEARTBEATS = "HPC_RL_HEARTBEATS"
"""Variable with the folder of the files."""
HEARTBEATS = "heartbeats"
"""Name of this folder in a job's temporary folder on a node."""
SUFFIX = ".heartbeat"
RUN = "run"
"""Phase outside of any other: the start and the end of a process."""
PROGRAM = "program"
"""Phase of a user's program outside of its training."""
_BYTES = 512
_LONGEST_NAME = 80

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")


@dataclass(frozen=True)
class Heartbeat:
    """What a process recorded last."""

    pid: int
    name: str
    """The process in messages: `rank 1`."""
    phase: str = RUN
    step: int = 0
    """Number of the training step, from 1; 0 before the first one, or if the process does not know it."""
    is_first: bool = True
    """Whether the process is in this phase for the first time, which takes longer: kernels are compiled, connections
    are made."""
    waits: bool = False
    """Whether it waits for other processes of the job, for as long as these take."""
    count: int = 0
    """Number of beats so far."""


class HeartbeatWriter:
    """Writes the heartbeats of this process: one object, which a pickle names and does not copy. Ray sends classes of
    the program that it starts with the objects that they use, and a copy in another process would beat beside this one.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._beat = Heartbeat(0, "")
        self._thread = 0
        self._seen: set[str] = set()

    def __reduce__(self) -> str:
        return "heart"

    def begin(self, name: str, waits: bool = False, phase: str = RUN) -> None:
        """Start recording. The process also writes its stacks from now on when the node entry asks for them.

        Args:
            waits: whether it waits for others, as an actor does between its calls, while it is in no phase.
            phase: what it is in outside of any other phase.
        """
        folder = os.environ.get(ENV_HEARTBEATS)
        if not folder or threading.current_thread() is not threading.main_thread():
            return
        pid, self._thread = os.getpid(), threading.get_ident()
        stacks.answer_requests(Path(folder) / f"{pid}{stacks.SUFFIX}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(Path(folder) / f"{pid}{SUFFIX}", flags, 0o600)
        self._seen = {RUN}
        self._write(Heartbeat(pid, name[:_LONGEST_NAME], phase, waits=waits))

    def beat(self) -> None:
        """Record that the work goes on."""
        if self._file is not None:
            self._write(self._beat)

    def at_step(self, number: int) -> None:
        """Record the number of the training step that begins."""
        if self._file is not None:
            self._write(self._beat, step=number)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record that the block is a phase. Phases may be nested; the innermost one counts."""
        with self._changed(phase=name, is_first=name not in self._seen, waits=False):
            yield
        if self._file is not None:
            self._seen.add(name)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record that the block waits for other processes of the job."""
        with self._changed(waits=True):
            yield

    @contextmanager
    def _changed(self, **fields: Any) -> Iterator[None]:
        # Phases belong to the main thread. Work that it has given to other threads may still beat.
        if self._file is None or threading.get_ident() != self._thread:
            yield
            return
        before = self._beat
        self._write(before, **fields)
        try:
            yield
        finally:
            restored = {name: getattr(before, name) for name in fields}
            self._write(self._beat, **restored)

    def _write(self, beat: Heartbeat, **fields: Any) -> None:
        values = {**asdict(beat), **fields, "count": beat.count + 1}
        self._beat = Heartbeat(**values)
        if self._file is None or os.getpid() != self._beat.pid:  # a forked process
            return
        # The block exists after the first write, so a full disk does not matter.
        with contextlib.suppress(OSError):
            os.pwrite(self._file, json.dumps(values).encode()[:_BYTES].ljust(_BYTES), 0)


heart = HeartbeatWriter()
"""The one of this process."""


def beats_in_calls(actor: type[C]) -> type[C]:
    """Have an actor record each call of its public methods as a phase, and the time between calls as waiting."""
    for name, method in list(vars(actor).items()):
        if callable(method) and not name.startswith("_"):
            setattr(actor, name, _as_phase(name, method))
    return actor


def _as_phase(name: str, method: Callable[P, T]) -> Callable[P, T]:
    @wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        with heart.phase(name):
            return method(*arguments, **named)

    return call


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Return what a process recorded last; None if the file is incomplete, or has just gone."""
    try:
        return Heartbeat(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
