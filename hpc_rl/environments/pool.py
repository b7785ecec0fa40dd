"""Conversations with environments in separate processes, so that one that hangs or crashes can be ended and replaced.

Each process has a thread, which starts it, sends it the requests about its conversations one after another, and waits
for each answer at most as long as the time limit. If a process is lost, all its conversations end with an error.
"""

from __future__ import annotations

import os
import queue
import select
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.environments.protocol import EpisodeResult, Message, Reply
from hpc_rl.environments.requests import (
    AnswerRequest,
    EnvironmentInfo,
    EnvironmentSpec,
    FinishRequest,
    Request,
    StartRequest,
    failed,
)
from hpc_rl.environments.tool_calls import MalformedCall, ToolCall
from hpc_rl.errors import RunError, UserError
from hpc_rl.system.worker_process import ProcessLost, WorkerProcess

START_TIMEOUT_S = 120.0
"""Time limit for a process to load an environment."""
_END_TIMEOUT_S = 10.0
CLOSED = "the environments were closed while a conversation was running"


class Environments(ABC):
    """Processes that run environments: those of an EnvironmentPool, or of several on other nodes."""

    offered: EnvironmentInfo
    workers: int
    """Number of processes."""

    def __init__(self) -> None:
        self._started = 0

    def start(self, prompt: list[Message], row: dict[str, Any]) -> Conversation:
        """Start a conversation about a row.

        Raises:
            RunError: no process is left, or this is closed.
        """
        self._started += 1
        return Conversation(self, self._started, self.submit(self._started, StartRequest(prompt, row)))

    @abstractmethod
    def submit(self, number: int, request: Request) -> Future[Any]:
        """Request something about the conversation of this number, from its StartRequest to its FinishRequest."""

    @abstractmethod
    def close(self) -> None:
        """End all processes at once. Requests without an answer raise RunError. A second `close` does nothing."""


class Conversation:
    """One conversation. Errors of the environment are in the answers; only a UserError of the pool is raised."""

    def __init__(self, environments: Environments, number: int, first: Future[Any]) -> None:
        self._environments, self._number = environments, number
        self.first: Future[Reply] = first
        """The messages with which the conversation starts."""

    def answer(self, text: str, calls: list[ToolCall | MalformedCall]) -> Future[Reply]:
        """Request the answer to the model's text, which has these tool calls."""
        return self._environments.submit(self._number, AnswerRequest(text, calls))

    def finish(self) -> Future[EpisodeResult]:
        """Request the reward, and end the conversation. Every conversation needs this once."""
        return self._environments.submit(self._number, FinishRequest())


class EnvironmentPool(Environments):
    """Processes that run environments, on this node; see Environments.

    Args:
        wanted: what each process loads.
        workers: number of processes. Each runs one reset, step, tool call or reward at a time.
        timeout_s: time limit for each of them.

    Raises:
        UserError: the environment or a tool cannot be loaded.
        RunError: a process ended, or took too long, while it loaded them.
    """

    def __init__(self, wanted: EnvironmentSpec, workers: int, timeout_s: float) -> None:
        super().__init__()
        self.workers = workers
        self._closing, self._close = os.pipe()
        self._closed = False
        self._workers = [_Worker(number, wanted, timeout_s, self._closing) for number in range(workers)]
        self._places: dict[int, _Worker] = {}
        """Where each conversation is."""
        try:
            self.offered = [worker.started() for worker in self._workers][-1]
        except UserError:
            self.close()
            raise

    def submit(self, number: int, request: Request) -> Future[Any]:
        """Queue a request for the process of its conversation. A new one goes to the process that has the fewest."""
        if isinstance(request, StartRequest):
            if self._closed:
                raise RunError(CLOSED)
            self._places[number] = min(self._workers, key=lambda each: each.load)
        worker = self._places.pop(number) if isinstance(request, FinishRequest) else self._places[number]
        return worker.submit(number, request)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.close(self._close)
        for worker in self._workers:
            worker.close()
        os.close(self._closing)


@dataclass(order=True)
class _Entry:
    """A request. Conversations that run go before those that start, because engines wait for their answers."""

    starts: bool
    """Whether it belongs to a conversation that has not started."""
    count: int
    future: Future[Any] | None = field(compare=False)
    """None with the last entry."""
    number: int = field(compare=False)
    request: Request | None = field(compare=False)


class _Worker:
    """A thread with its process."""

    def __init__(self, number: int, wanted: EnvironmentSpec, timeout_s: float, closing: int) -> None:
        self._wanted, self._timeout_s, self._closing = wanted, timeout_s, closing
        self._requests: queue.PriorityQueue[_Entry] = queue.PriorityQueue()
        self._loaded: Future[EnvironmentInfo] = Future()
        self._open: set[int] = set()
        self._lost: dict[int, str] = {}
        """Reasons for which conversations have ended that are not finished yet."""
        self._count = 0
        self._sent = 0
        """Requests that processes got. An answer has the number of its request."""
        self.load = 0
        """Conversations that are not finished."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f"environment-{number}", daemon=True)
        self._thread.start()

    def started(self) -> EnvironmentInfo:
        """Wait until the process has loaded the environment."""
        return self._loaded.result(2 * START_TIMEOUT_S)

    def submit(self, number: int, request: Request) -> Future[Any]:
        """Queue a request."""
        future: Future[Any] = Future()
        with self._lock:
            self.load += isinstance(request, StartRequest)
            self.load -= isinstance(request, FinishRequest)
        self._put(future, number, request)
        if not self._thread.is_alive():  # it may have ended without this request
            self._refuse(RunError(CLOSED))
        return future

    def close(self) -> None:
        """Wait for the end of the thread, which `closing` has requested."""
        self._put(None, 0, None)
        self._thread.join(_END_TIMEOUT_S)
        self._refuse(RunError(CLOSED))

    def _refuse(self, error: UserError) -> None:
        """Let all queued requests raise an error."""
        while True:
            try:
                entry = self._requests.get_nowait()
            except queue.Empty:
                return
            if entry.future is not None:
                entry.future.set_exception(error)

    def _put(self, future: Future[Any] | None, number: int, request: Request | None) -> None:
        with self._lock:
            self._count += 1
            entry = _Entry(number not in self._open, self._count, future, number, request)
        self._requests.put(entry)

    def _serve(self) -> None:
        try:
            process, offered = self._start()
        except UserError as error:
            self._loaded.set_exception(error)
            return
        self._loaded.set_result(offered)
        try:
            while (entry := self._requests.get()).request is not None and (future := entry.future) is not None:
                try:
                    if _is_readable(self._closing):
                        raise RunError(CLOSED)
                    if not process.alive:  # it ended between two requests
                        process.end()
                        self._lose("ended before its next call")
                        process, _ = self._start()
                    future.set_result(self._answer(process, entry.number, entry.request))
                except Exception as error:  # noqa: BLE001 - whoever waits for the answer gets it
                    future.set_exception(error)
        finally:
            process.end()

    def _start(self) -> tuple[WorkerProcess, EnvironmentInfo]:
        process = WorkerProcess("hpc_rl.environments.worker", START_TIMEOUT_S, self._closing)
        try:
            process.send(self._wanted)
            found = process.receive(START_TIMEOUT_S)
        except ProcessLost as error:
            named = ", ".join(filter(None, [self._wanted.environment, *self._wanted.tools]))
            raise RunError(f"environment.name {named}: a process {error} while it loaded it") from error
        if isinstance(found, UserError):
            process.end()
            raise found
        return process, found

    def _answer(self, process: WorkerProcess, number: int, request: Request) -> Reply | EpisodeResult:
        """Return the answer of the process, or the error with which the conversation has ended."""
        if isinstance(request, StartRequest):
            self._open.add(number)
        reason = self._lost.get(number)
        if reason is None:
            try:
                self._sent += 1
                process.send((self._sent, number, request))
                answer = self._receive(process)
            except ProcessLost as lost:
                if _is_readable(self._closing):
                    raise RunError(CLOSED) from lost
                self._lose("a call of another conversation " + str(lost))
                reason = self._lost[number] = f"the environment {lost}"
            except Exception as error:  # noqa: BLE001 - pickle raises whatever the user's class raises
                reason = self._lost[number] = (
                    f"its row or its answer cannot be passed on: {type(error).__name__}: {error}"
                )
            else:
                if isinstance(answer, Reply) and answer.error is not None:
                    self._lost[number] = answer.error
                self._forget(number, request)
                return answer
        self._forget(number, request)
        return failed(request, reason)

    def _receive(self, process: WorkerProcess) -> Reply | EpisodeResult:
        """Return the answer to the latest request. A process that sends another one is ended."""
        while True:
            count, answer = process.receive(self._timeout_s)
            if count != self._sent:
                process.end()
                raise ProcessLost("answered another request and was ended")
            if answer is not None:
                return answer  # type: ignore[no-any-return]

    def _lose(self, reason: str) -> None:
        for number in self._open:
            self._lost.setdefault(number, f"the process of the environment was lost: {reason}")

    def _forget(self, number: int, request: Request) -> None:
        if isinstance(request, FinishRequest):
            self._open.discard(number)
            self._lost.pop(number, None)


def _is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
