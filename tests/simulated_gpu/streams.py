"""Streams and events of a GPU that does not exist. They do nothing, but each thread has a current stream, as in CUDA.

What a program does with them is in the record of its rank (`record.py`).
"""

from __future__ import annotations

import itertools
import threading
from typing import Any, Self

from tests.simulated_gpu import record

_numbers = itertools.count(1)


class Stream:
    """A stream. In a `with` block it is the current one of the thread, as torch.Stream is."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **_: Any) -> None:
        self.name = name or f"stream {next(_numbers)}"
        self.priority = priority
        self.device_index = device if isinstance(device, int) else 0
        self.cuda_stream = 0 if name else id(self)
        self._before: list[Stream | None] = []

    def wait_stream(self, other: Stream) -> None:
        """Let what comes next in this stream wait for what is in the other one."""
        record.note("wait_stream", self.name, other.name)

    def wait_event(self, event: Event) -> None:
        """Let what comes next in this stream wait for an event."""
        record.note("wait_event", self.name, event.name)

    def record_event(self, event: Event | None = None) -> Event:
        """Put an event into this stream."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        record.note("synchronize", self.name)

    def query(self) -> bool:
        """Return whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being recorded."""
        return False

    def __enter__(self) -> Self:
        self._before.append(_set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _set(self._before.pop())

    def __repr__(self) -> str:
        return f"<{self.name}>"


DEFAULT = Stream(name="default")


class Event:
    """An event in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.name = f"event {next(_numbers)}"
        self.stream: Stream | None = None
        """Where it was recorded last."""

    def record(self, stream: Stream | None = None) -> Self:
        """Put the event into a stream."""
        self.stream = stream or current_stream()
        record.note("record", self.stream.name, self.name)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """Let what comes next in a stream wait for the event."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        record.note("synchronize", self.name)

    def query(self) -> bool:
        """Return whether the event has happened."""
        return True

    def elapsed_time(self, _end: Event) -> float:
        """Return milliseconds."""
        return 0.0


class _Current(threading.local):
    stream: Stream | None = None


_current = _Current()


def current_stream(*_: Any, **__: Any) -> Stream:
    """Return the thread's current stream."""
    return _current.stream or DEFAULT


def default_stream(*_: Any, **__: Any) -> Stream:
    """Return the stream that is the current one of each new thread."""
    return DEFAULT


def set_stream(stream: Stream) -> None:
    """Make a stream the thread's current one."""
    _set(stream)


class StreamContext:
    """Makes a stream the current one in a `with` block; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.__exit__()


def _set(stream: Stream | None) -> Stream | None:
    before, _current.stream = _current.stream, stream
    return before
