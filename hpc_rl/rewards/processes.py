"""Calls of reward functions in separate processes, so that one that hangs or crashes can be ended and replaced.

Each process has a thread, which starts it, sends it a call, and waits for the result at most as long as the time limit.
The kernel ends the process when its thread ends, however this program ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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


class RewardProcesses:
    """Processes of which each has loaded the same functions.

    Raises:
        UserError: a function cannot be loaded.
        RunError: a process ended, or took too long, while it loaded the functions.
    """

    def __init__(self, functions: Sequence[Function], workers: int, timeout_s: float) -> None:
        self._functions, self._workers, self._timeout_s = functions, workers, timeout_s
        self._closing, self._close = os.pipe()
        self._closed = False
        self._threads = ThreadPoolExecutor(workers, "reward")
        self._own = threading.local()
        """Of each thread: its process."""
        self.extras: list[list[str]] = []
        """For each function, the names in signature.EXTRAS that are its parameters."""
        starting = [self._threads.submit(self._start) for _ in range(workers)]
        try:
            for started in starting:
                started.result()
        except UserError:
            self.close()
            raise

    def results(self, calls: Sequence[Call]) -> list[Result]:
        """Return the results of all calls, in order. A process that is free takes the next one.

        Raises:
            UserError: a process that replaced another one could not load a function.
            RunError: the processes were closed meanwhile.
        """
        try:
            futures = [self._threads.submit(self._result, call) for call in calls]
        except RuntimeError as error:  # the threads take no more calls
            raise RunError(_CLOSED) from error
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End all processes at once. `results` raises RunError if it is waiting. A second `close` does nothing."""
        if self._closed:
            return
        self._closed = True
        os.close(self._close)
        together = threading.Barrier(self._workers)
        ending = [self._threads.submit(self._end, together) for _ in range(self._workers)]
        self._threads.shutdown(wait=False)
        wait(ending, _END_TIMEOUT_S)
        os.close(self._closing)

    def _result(self, call: Call) -> Result:
        """Call a function in the process of this thread, which is replaced if it has ended."""
        if self._closed:
            raise RunError(_CLOSED)
        process = self._start()
        try:
            process.send(call)
            return Result(*process.receive(self._timeout_s))
        except ProcessLost as lost:
            if self._closed:
                raise RunError(_CLOSED) from lost
            return failed(str(lost))
        finally:
            heart.beat()

    def _start(self) -> WorkerProcess:
        """Return the process of this thread, after its start if there is none that is alive."""
        process: WorkerProcess | None = getattr(self._own, "process", None)
        if process is not None:
            if process.alive:
                return process
            process.end()
        self._own.process = process = WorkerProcess("hpc_rl.rewards.worker", self._timeout_s, self._closing)
        try:
            process.send([(spec, dict(kwargs)) for spec, kwargs in self._functions])
            found = process.receive(START_TIMEOUT_S * len(self._functions))
        except ProcessLost as error:
            specs = ", ".join(spec for spec, _ in self._functions)
            raise RunError(f"reward.function {specs}: a reward process {error} while it loaded the function") from error
        if isinstance(found, UserError):
            process.end()
            raise found
        self.extras = found
        return process

    def _end(self, together: threading.Barrier) -> None:
        """End the process of this thread. All threads do this together, so that none does it twice."""
        if (process := getattr(self._own, "process", None)) is not None:
            process.end()
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(_END_TIMEOUT_S)
