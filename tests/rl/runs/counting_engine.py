"""An engine in an actor that generates without a model: the response to a request is its seed, in as many turns."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence

import numpy as np

from hpc_rl.errors import RunError, UserError
from hpc_rl.rl.rollout.engine import Completion, Request, SliceResult, Span

HANGS, DIES, REFUSES, LACKS_MEMORY = 1001, 1002, 1003, 1004
"""Seeds of requests with which the first engine in its place hangs, an engine dies, it reports a mistake, or the first
engine in its place has too little memory."""


class CountingEngine:
    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first
        self._left: dict[int, tuple[Request, int]] = {}
        self.calls = 0
        self._leaves = False

    def start(self, how: str = "") -> None:
        if how == "hangs":
            threading.Event().wait()
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "refuses":
            raise UserError("no such model")
        if how == "raises":
            raise ValueError("no free memory")

    def answer(self) -> None: ...

    def pid(self) -> int:
        return os.getpid()

    def advance(self, requests: Sequence[Request], slice_s: float, version: int) -> SliceResult:
        """Complete the requests whose seed is not larger than the calls since they arrived."""
        self.calls += 1
        for request in requests:
            if request.seed == HANGS and self._is_first:
                threading.Event().wait()
            if request.seed == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            if request.seed == REFUSES:
                raise UserError("too long")
            if request.seed == LACKS_MEMORY and self._is_first:
                raise RunError("out of memory")
            self._left[request.number] = request, self.calls
        time.sleep(min(slice_s, 0.01) if self._left else 0)
        done = [
            number
            for number, (request, since) in self._left.items()
            if request.seed in (HANGS, LACKS_MEMORY, self.calls - since)
        ]
        completed = []
        for number in done:
            request, _ = self._left.pop(number)
            token = np.array([request.seed], np.int32)
            completed.append((number, Completion(token, np.zeros(1, np.float32), True, (Span(version, 1),))))
        return SliceResult(completed, 0.5, unfinished=7 * len(self._left), leaves=self._leaves)

    def leave(self) -> None:
        """Let the engine's node be about to leave."""
        self._leaves = True

    def withdraw(self) -> SliceResult:
        """Give back all requests, half of them with a token."""
        part = Completion(np.array([9], np.int32), np.zeros(1, np.float32), False, (Span(0, 1),))
        begun = {number: part for number in self._left if number % 2}
        self._left.clear()
        return SliceResult([], 0.0, begun=begun)
