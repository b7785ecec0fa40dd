"""What a rank has done, written down before it does it, so that it can be read when the rank hangs."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Collective(NamedTuple):
    """One rank's part of an exchange."""

    name: str
    """The method of the process group: allreduce, all_gather_single, send, ..."""
    group: str
    """Name of the process group, the same on all of its ranks."""
    ranks: tuple[int, ...]
    """Ranks of the group, numbered in the job."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that the ranks have in common: not those that only a root has."""
    dtype: str
    stream: str
    """The current stream."""
    thread: str
    """The thread: the background writer has its own group."""
    detail: str = ""
    """Root and operation; of send and recv the other rank."""

    @property
    def in_common(self) -> tuple[Any, ...]:
        """What has to be the same on all ranks of the group."""
        return self.name, self.shapes, self.dtype, self.detail

    def __str__(self) -> str:
        shapes = ", ".join(str(list(shape)) for shape in self.shapes)
        return f"{self.name}({shapes} {self.dtype} {self.detail}) on {self.stream}".replace(" )", ")")


class Call(NamedTuple):
    """A call of a stream or an event: its name and the names of the two."""

    name: str
    subject: str
    other: str = ""


PAIRWISE = {"send", "recv", "recv_anysource"}
"""Exchanges of two ranks, which only these two have to agree on."""

_file: int | None = None


def open_record(path: Path) -> None:
    """Let this process write its record to a file."""
    global _file
    _file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(name: str, subject: str, other: str = "") -> None:
    """Write down a call of a stream or an event."""
    _write(Call(name, subject, other))


def note_collective(
    name: str,
    group: str,
    ranks: Sequence[int],
    tensors: Sequence[torch.Tensor],
    detail: str = "",
) -> None:
    """Write down an exchange that begins now, of torch's process groups or of a stand-in for another library.

    Args:
        group: name of the communicator, the same on all of its ranks.
        ranks: the numbers in the job of the ranks in the group.
        tensors: those whose shapes all ranks have to agree on.
    """
    from tests.simulated_gpu.streams import current_stream

    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    thread = threading.current_thread().name
    _write(Collective(name, group, tuple(ranks), shapes, dtype, current_stream().name, thread, detail))


def parsed(text: str) -> list[Collective | Call]:
    """Return the record that some lines of a file have."""
    found: list[Collective | Call] = []
    for line in text.splitlines():
        values = json.loads(line)
        if len(values) == len(Call._fields):
            found.append(Call(*values))
        else:
            name, group, ranks, shapes, *rest = values
            found.append(Collective(name, group, tuple(ranks), tuple(map(tuple, shapes)), *rest))
    return found


def _write(row: Collective | Call) -> None:
    if _file is not None:
        os.write(_file, (json.dumps(row) + "\n").encode())
