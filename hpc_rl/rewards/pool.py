"""Calls of a reward function in processes of their own, so that one that hangs or crashes can be ended and replaced.

One thread per process: it starts its process, hands it calls, and waits for each answer no longer than the time limit.
The kernel ends the process when that thread goes, however this program ends.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from hpc_rl.errors import RunError, UserError
from hpc_rl.host.processes import shell_code
from hpc_rl.rewards.worker import Call, Result, failed

START_TIMEOUT_S = 120.0
"""In which a process must have imported the function."""
_END_TIMEOUT_S = 10.0


class Lost(Exception):
    """The process gave no answer to its call; the message says why. It has ended."""


class Batch:
    """Calls that the threads share out among themselves, and the queue of what came of them."""

    def __init__(self, calls: Sequence[Call], workers: int) -> None:
        self.calls = calls
        self.done: queue.SimpleQueue[tuple[int, Result] | UserError] = queue.SimpleQueue()
        self._workers = workers
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> deque[int]:
        """Indices for one process: many at first, one by one towards the end, so that all finish together."""
        with self._lock:
            left = len(self.calls) - self._next
            taken = range(self._next, self._next + -(-left // (2 * self._workers)))
            self._next = taken.stop
        return deque(taken)

    def drop(self) -> None:
        """Leave nothing to take."""
        with self._lock:
            self._next = len(self.calls)


class Child:
    """One scoring process. It belongs to the thread that starts it.

    Args:
        closing: file descriptor that becomes readable when nobody waits for answers any more.

    Raises:
        UserError: the function cannot be loaded.
        RunError: the process did not get as far as to say so.
    """

    def __init__(self, spec: str, kwargs: Mapping[str, Any], timeout_s: float, closing: int) -> None:
        self._timeout_s, self._closing = timeout_s, closing
        ours, theirs = socket.socketpair()
        # A process that takes nothing in must not block its thread: writing to it gives up as well.
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hpc_rl.rewards.worker", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        try:
            self._connection.send((spec, dict(kwargs)))
            found = self._receive(START_TIMEOUT_S)
        except (Lost, OSError) as error:
            self.end()
            raise RunError(f"reward.function {spec}: its process {error} while it was loaded") from error
        if isinstance(found, UserError):
            self.end()
            raise found
        self.extras: list[str] = found
        """Which of signature.EXTRAS the function wants."""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def answers(self, calls: Sequence[Call]) -> Iterator[Result]:
        """The results, each as it comes.

        Raises:
            Lost: at the first call without an answer.
        """
        try:
            self._connection.send(calls)
            for _ in calls:
                yield self._receive(self._timeout_s)
        except OSError as error:
            self.end()
            raise Lost(f"took no calls ({error})") from error

    def end(self) -> None:
        """Kill the process and all that it started in its session."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._connection.close()

    def _receive(self, timeout_s: float) -> Any:
        ready = wait([self._connection, self._closing], timeout_s)
        try:
            if self._connection in ready:
                return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self.end()
            raise Lost(f"ended with exit code {shell_code(self._process.returncode)}") from error
        self.end()
        raise Lost("was ended with its scorer" if ready else f"took over {timeout_s:g} s and was ended")


class Pool:
    """Processes that have loaded one function.

    Raises:
        UserError: the function cannot be loaded.
    """

    def __init__(self, spec: str, kwargs: Mapping[str, Any], workers: int, timeout_s: float) -> None:
        self._spec, self._kwargs, self._workers, self._timeout_s = spec, kwargs, workers, timeout_s
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[list[str] | UserError] = queue.SimpleQueue()
        self._closing, self._close = os.pipe()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, name=f"reward-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        self.extras: list[str] = []
        """Which of signature.EXTRAS the function wants."""
        for _ in self._threads:
            found = self._started.get(timeout=2 * START_TIMEOUT_S)
            if isinstance(found, UserError):
                self.close()
                raise found
            self.extras = found

    def results(self, calls: Sequence[Call]) -> list[Result]:
        """One result per call, in order.

        Raises:
            UserError: a process that replaces another could not load the function any more.
        """
        batch = Batch(calls, self._workers)
        for _ in self._threads:
            self._batches.put(batch)
        results: list[Result] = [failed("not called")] * len(calls)
        for _ in calls:
            try:
                done = batch.done.get(timeout=self._timeout_s + 2 * START_TIMEOUT_S)
            except queue.Empty:
                done = RunError("reward.function: its processes give no answers")
            if isinstance(done, UserError):
                batch.drop()
                raise done
            index, result = done
            results[index] = result
        return results

    def close(self) -> None:
        """End all processes, at once; `results` that somebody waits for raises RunError. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.close(self._close)
        for _ in self._threads:
            self._batches.put(None)
        for thread in self._threads:
            thread.join(_END_TIMEOUT_S)
        os.close(self._closing)

    def _start(self) -> Child:
        return Child(self._spec, self._kwargs, self._timeout_s, self._closing)

    def _serve(self) -> None:
        try:
            child = self._start()
        except UserError as error:
            self._started.put(error)
            return
        self._started.put(child.extras)
        try:
            while (batch := self._batches.get()) is not None:
                try:
                    while indices := batch.take():
                        if not child.alive:
                            child.end()
                            child = self._start()
                        child = self._work(child, batch, indices)
                except UserError as error:
                    batch.done.put(error)
        finally:
            child.end()

    def _work(self, child: Child, batch: Batch, indices: deque[int]) -> Child:
        """Have some calls answered; returns the process to go on with, another one where this was lost."""
        while indices:
            try:
                for result in child.answers([batch.calls[index] for index in indices]):
                    batch.done.put((indices.popleft(), result))
            except Lost as lost:
                if self._closed.is_set():
                    raise RunError("reward.function: the scorer was closed while it scored") from lost
                batch.done.put((indices.popleft(), failed(str(lost))))
                child = self._start()
        return child
