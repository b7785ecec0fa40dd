"""Calls of reward functions in separate processes, so that one that hangs or crashes can be ended and replaced.

Each process has a thread, which starts it, sends it calls, and waits for each result at most as long as the time limit.
The kernel ends the process when its thread ends, however this program ends.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc_rl.errors import RunError, UserError
from hpc_rl.liveness.heartbeat import heart
from hpc_rl.rewards.worker import Call, Result, failed
from hpc_rl.system.worker_process import ProcessLost, WorkerProcess

Function = tuple[str, Mapping[str, Any]]
"""A reward function by its name, and its keyword arguments."""
START_TIMEOUT_S = 120.0
"""Time limit for a process to import a function."""
_END_TIMEOUT_S = 10.0
_CLOSED = "reward.function: the scorer was closed while it scored"


class CallQueue:
    """Calls that the threads distribute among themselves, and the queue of their results."""

    def __init__(self, calls: Sequence[Call], workers: int) -> None:
        self.calls = calls
        self.done: queue.SimpleQueue[tuple[int, Result] | UserError] = queue.SimpleQueue()
        self._workers = workers
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> deque[int]:
        """Take the indices of some calls for one process: many at first and few at the end, so that all processes
        finish at about the same time."""
        with self._lock:
            left = len(self.calls) - self._next
            taken = range(self._next, self._next + -(-left // (2 * self._workers)))
            self._next = taken.stop
        return deque(taken)

    def drop(self) -> None:
        """Discard the calls that are not taken."""
        with self._lock:
            self._next = len(self.calls)


class RewardProcess:
    """One process that scores. It belongs to the thread that starts it.

    Args:
        closing: file descriptor that becomes readable when the results are no longer needed.

    Raises:
        UserError: a function cannot be loaded.
        RunError: the process ended, or took too long, while it loaded the functions.
    """

    def __init__(self, functions: Sequence[Function], timeout_s: float, closing: int) -> None:
        self._timeout_s = timeout_s
        self._process = WorkerProcess("hpc_rl.rewards.worker", timeout_s, closing)
        try:
            self._process.send([(spec, dict(kwargs)) for spec, kwargs in functions])
            found = self._process.receive(START_TIMEOUT_S * len(functions))
        except ProcessLost as error:
            specs = ", ".join(spec for spec, _ in functions)
            raise RunError(f"reward.function {specs}: a reward process {error} while it loaded the function") from error
        if isinstance(found, UserError):
            self.end()
            raise found
        self.extras: list[list[str]] = found
        """For each function, the names in signature.EXTRAS that are its parameters."""

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.alive

    def results(self, calls: Sequence[Call]) -> Iterator[Result]:
        """Yield the result of each call as it arrives.

        Raises:
            ProcessLost: at the first call without a result.
        """
        self._process.send(calls)
        for _ in calls:
            yield Result(*self._process.receive(self._timeout_s))

    def end(self) -> None:
        """Kill the process and all processes of its session."""
        self._process.end()


class RewardProcesses:
    """Processes of which each has loaded the same functions.

    Raises:
        UserError: a function cannot be loaded.
    """

    def __init__(self, functions: Sequence[Function], workers: int, timeout_s: float) -> None:
        self._functions, self._workers, self._timeout_s = functions, workers, timeout_s
        self._start_s = START_TIMEOUT_S * len(functions)
        self._queues: queue.SimpleQueue[CallQueue | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[list[list[str]] | UserError] = queue.SimpleQueue()
        self._closing, self._close = os.pipe()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, name=f"reward-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        self.extras: list[list[str]] = []
        """For each function, the names in signature.EXTRAS that are its parameters."""
        for _ in self._threads:
            found = self._started.get(timeout=2 * self._start_s)
            if isinstance(found, UserError):
                self.close()
                raise found
            self.extras = found

    def results(self, calls: Sequence[Call]) -> list[Result]:
        """Return the results of all calls, in order. A process that is free takes the next ones.

        Raises:
            UserError: a process that replaced another one could not load a function.
            RunError: the processes were closed meanwhile.
        """
        shared = CallQueue(calls, self._workers)
        for _ in self._threads:
            self._queues.put(shared)
        if self._closed.is_set():  # the threads may have ended without these calls
            raise RunError(_CLOSED)
        results: list[Result] = [failed("not called")] * len(calls)
        for _ in calls:
            try:
                done = shared.done.get(timeout=self._timeout_s + 2 * self._start_s)
            except queue.Empty:
                done = RunError("reward.function: the reward processes do not answer")
            if isinstance(done, UserError):
                shared.drop()
                raise done
            heart.beat()
            index, result = done
            results[index] = result
        return results

    def close(self) -> None:
        """End all processes at once. `results` raises RunError if it is waiting. A second `close` does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.close(self._close)
        for _ in self._threads:
            self._queues.put(None)
        for thread in self._threads:
            thread.join(_END_TIMEOUT_S)
        os.close(self._closing)

    def _start(self) -> RewardProcess:
        return RewardProcess(self._functions, self._timeout_s, self._closing)

    def _serve(self) -> None:
        try:
            process = self._start()
        except UserError as error:
            self._started.put(error)
            return
        self._started.put(process.extras)
        try:
            while (shared := self._queues.get()) is not None:
                try:
                    while indices := shared.take():
                        if not process.alive:
                            process.end()
                            process = self._start()
                        process = self._work(process, shared, indices)
                except UserError as error:
                    shared.done.put(error)
        finally:
            process.end()

    def _work(self, process: RewardProcess, shared: CallQueue, indices: deque[int]) -> RewardProcess:
        """Process some calls. Return the process for the next ones: another one if this one was lost."""
        while indices:
            try:
                for result in process.results([shared.calls[index] for index in indices]):
                    shared.done.put((indices.popleft(), result))
            except ProcessLost as lost:
                if self._closed.is_set():
                    raise RunError(_CLOSED) from lost
                shared.done.put((indices.popleft(), failed(str(lost))))
                process = self._start()
        return process
