"""Processes that take turns: each stays alive with everything that it has loaded, and works on request.

A turn is one message with the number of steps to do, and one reply with the seconds of their parts. Wall and processor
seconds are measured from outside; processor seconds are those of all descendants, since Ray uses several processes.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

_SOCKET, _KEY = "HPC_RL_BENCHMARK_SOCKET", "HPC_RL_BENCHMARK_KEY"
START_S, TURN_S, END_S = 300, 600, 60
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Turn:
    wall_s: float
    processor_s: float
    phases: dict[str, float]
    """Seconds of the parts of one step, as the process measures them."""


class Contestant:
    """One process, seen from outside.

    Args:
        module: the module for `python -m`; it calls `connect` and then waits for turns.
    """

    def __init__(self, module: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        key = secrets.token_hex(16)
        address = str(log.with_suffix(".sock"))
        self._listener = Listener(address, "AF_UNIX", authkey=key.encode())
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**os.environ, **env, _SOCKET: address, _KEY: key},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._connection: Connection[Any, Any] | None = None

    def wait_until_ready(self) -> None:
        self._listener._listener._socket.settimeout(1)  # type: ignore[attr-defined]
        deadline = time.monotonic() + START_S
        while self._connection is None:
            try:
                self._connection = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._fail("did not start")
        self._answer(START_S)

    def turn(self, steps: int) -> Turn:
        assert self._connection is not None
        processor, start = tree_seconds(self._process.pid), time.perf_counter()
        self._connection.send(steps)
        phases = self._answer(TURN_S)
        wall = time.perf_counter() - start
        processor = tree_seconds(self._process.pid) - processor
        return Turn(wall / steps, processor / steps, phases)

    def end(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        if self._connection is not None and self._process.poll() is None:
            self._connection.send(0)
        try:
            self._process.wait(END_S if self._connection else 0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._listener.close()

    def _answer(self, timeout_s: float) -> dict[str, float]:
        assert self._connection is not None
        if not self._connection.poll(timeout_s):
            self._fail(f"no answer in {timeout_s} s")
        try:
            found: dict[str, float] = self._connection.recv()
        except EOFError:
            self._fail("ended")
        return found

    def _fail(self, what: str) -> Any:
        text = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{text}\nbenchmarks.ppo: {self.log.stem}: {what}")


@contextmanager
def contestants(started: Sequence[Contestant]) -> Iterator[None]:
    try:
        for contestant in started:
            contestant.wait_until_ready()
        yield
    finally:
        for contestant in started:
            contestant.end()


@dataclass
class Pace:
    """The same process, seen from inside: call `step_done` after every step, which waits for the next turn.

    Args:
        warm_up: steps before the first turn.
    """

    warm_up: int
    connection: Connection[Any, Any] = field(default_factory=lambda: connect())
    left: int = 0
    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.left = self.warm_up

    def step_done(self, phases: Mapping[str, float]) -> bool:
        """Finish a step.

        Args:
            phases: seconds of the step's parts, by name.

        Returns:
            whether another step follows.
        """
        self.steps += 1
        for name, seconds in phases.items():
            self.sums[name] = self.sums.get(name, 0.0) + seconds
        self.left -= 1
        if self.left:
            return True
        self.connection.send({name: total / self.steps for name, total in self.sums.items()})
        self.sums, self.steps = {}, 0
        self.left = self.connection.recv()
        return self.left > 0


def connect() -> Connection[Any, Any]:
    return Client(os.environ[_SOCKET], "AF_UNIX", authkey=os.environ[_KEY].encode())


def tree_seconds(root: int) -> float:
    """Return the processor time so far of a process and of all its living descendants, in seconds; see proc(5)."""
    parents, ticks = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
    family = {root}
    while found := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= found
    return sum(ticks.get(pid, 0) for pid in family) * TICK_S
