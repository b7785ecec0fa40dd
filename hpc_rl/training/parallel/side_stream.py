"""Copies beside the usual work of a device, on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """A stream for copies between a device and its host. On a CPU there is none, and copies are done at once.

    Args:
        device: the device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = None if device.type == "cpu" else torch.get_device_module(device.type)
        self.stream = None if self._accelerator is None else self._accelerator.Stream()

    @property
    def pins(self) -> bool:
        """Whether host memory has to be page-locked, so that copies do not stop the host."""
        return self.stream is not None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copy on this stream, after the work that the device has been given so far."""
        if self._accelerator is None or self.stream is None:
            yield
            return
        self.stream.wait_stream(self._accelerator.current_stream())
        with self._accelerator.stream(self.stream), torch.no_grad():
            yield

    def mark(self) -> Any:
        """Return an event at the end of the copies so far; None on a CPU."""
        return None if self.stream is None else self.stream.record_event()

    def await_mark(self, mark: Any) -> None:
        """Let the device wait for an event before the work that it is given next. The host does not wait."""
        if mark is not None and self._accelerator is not None:
            self._accelerator.current_stream().wait_event(mark)
