"""An engine in an actor that generates without a model: the response to a request is its seed, in as many turns."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from unittest import mock

import numpy as np

# Engines with a model need these, and importing them in each of these processes would take most of the time.
_UNUSED = (
    *("torch", "torch.distributed", "torch.distributed.fsdp", "hpc_rl.training.models.causal_lm"),
    *("transformers", "transformers.generation", "transformers.generation.configuration_utils"),
)
if "torch" not in sys.modules:
    sys.modules |= {name: mock.MagicMock() for name in _UNUSED}

from hpc_rl.errors import UserError  # noqa: E402
from hpc_rl.rl.rollout.engine import Completion, Progress, Request, Span  # noqa: E402

HANGS, DIES, REFUSES = 1001, 1002, 1003
"""Seeds of requests with which the first engine in its place hangs, an engine dies, or it reports a mistake."""


class CountingEngine:
    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first
        self._left: dict[int, tuple[Request, int]] = {}
        self.calls = 0

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

    def advance(self, requests: Sequence[Request], slice_s: float, version: int) -> Progress:
        """Complete the requests whose seed is not larger than the calls since they arrived."""
        self.calls += 1
        for request in requests:
            if request.seed == HANGS and self._is_first:
                threading.Event().wait()
            if request.seed == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            if request.seed == REFUSES:
                raise UserError("too long")
            self._left[request.number] = request, self.calls
        time.sleep(min(slice_s, 0.01) if self._left else 0)
        done = [
            number for number, (request, since) in self._left.items() if request.seed in (HANGS, self.calls - since)
        ]
        completed = []
        for number in done:
            request, _ = self._left.pop(number)
            token = np.array([request.seed], np.int32)
            completed.append((number, Completion(token, np.zeros(1, np.float32), True, (Span(version, 1),))))
        return Progress(completed, 0.5)
