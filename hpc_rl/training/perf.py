"""Wall time of phases, and the peak speed and memory of devices."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpc_rl.formats.gpu_models import reported
from hpc_rl.liveness.heartbeat import heart

GAP_S = 0.1
"""A shorter gap between two spans of a phase is not recorded: engines generate in calls of about this time."""

_MOST_SPANS = 10_000
"""Of a phase. In processes and jobs whose spans nobody takes, the oldest are forgotten."""

Span = tuple[float, float]
"""Start and end in seconds."""


class Spans:
    """When phases took place: `with spans("update_actor"): ...`. Any thread may record one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, list[Span]] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(phase, start, time.perf_counter())

    def add(self, phase: str, start: float, end: float) -> None:
        """Record a span, as time.perf_counter() measured it. It becomes one with those that it overlaps or follows."""
        with self._lock:
            found = self._found.setdefault(phase, [])
            while found and found[-1][1] + GAP_S >= start:
                earlier = found.pop()
                start, end = min(start, earlier[0]), max(end, earlier[1])
            found.append((start, end))
            del found[:-_MOST_SPANS]

    def take(self) -> dict[str, list[Span]]:
        """Return the spans of each phase since the last call, relative to now: (-5.0, -2.0) ended 2 seconds ago.

        The clocks of two processes differ, but the time that has passed since then does not.
        """
        with self._lock:
            found, self._found = self._found, {}
            now = time.perf_counter()
        return {phase: [(start - now, end - now) for start, end in spans] for phase, spans in found.items()}


class Clock:
    """The wall time of the phases of a step: `with clock("data"): ...` adds to seconds["timing_s/data"].

    A phase is also one of this process's heartbeats.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.spans = Spans()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with heart.phase(phase):
            yield
        end = time.perf_counter()
        name = f"timing_s/{phase}"
        self.seconds[name] = self.seconds.get(name, 0.0) + end - start
        self.spans.add(phase, start, end)


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bfloat16 operations per second of a device, or None if they are unknown."""
    if device.type == "cpu":
        return None
    name = torch.get_device_module(device.type).get_device_name(device)
    model = reported(name)
    return None if model is None else model.tflops * 1e12


def memory_bytes(device: torch.device) -> int | None:
    """Return the memory of an accelerator, or None for a CPU, whose memory all ranks of a node share."""
    return None if device.type == "cpu" else torch.get_device_module(device).mem_get_info(device)[1]


def max_memory_gb(device: torch.device) -> float:
    """Return the peak memory of this rank so far, in 10^9 bytes: on the GPU, or of the process if it uses none."""
    if device.type != "cpu":
        return float(torch.get_device_module(device.type).max_memory_allocated(device)) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
