"""TCP ports that do not collide: not with other jobs on the node, and not with outgoing connections."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from hpc_rl.errors import UserError

_FIRST = 12000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(key: str, address: str) -> int:
    """A port that can be bound on `address` now, below the kernel's ephemeral range.

    Jobs start their search at a place given by `key` (job id and restart), so two jobs that start on one node in the
    same second do not race for the same port.

    Raises:
        UserError: every port of the range is taken.
    """
    last = _last_port()
    for port in _candidates(key, _FIRST, last):
        if _is_free(port, address):
            return port
    raise UserError(f"no free TCP port between {_FIRST} and {last} on {socket.gethostname()}")


class PortBlock:
    """Neighbouring ports that belong to this process: it holds the first one, which stands for the others.

    A context manager. Two jobs that start on one node in the same second cannot get the same block.
    """

    def __init__(self, first: int, guard: socket.socket) -> None:
        self.first = first
        self._guard = guard

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._guard.close()


def free_block(key: str, size: int) -> PortBlock:
    """A block of `size` ports that are free on every interface, below the kernel's ephemeral range.

    Raises:
        UserError: no such block is left.
    """
    last = _last_port()
    for number in _candidates(key, 0, (last - _FIRST + 1) // size - 1):
        first = _FIRST + number * size
        if block := _take(first, size):
            return block
    raise UserError(f"no {size} free TCP ports in a row between {_FIRST} and {last} on {socket.gethostname()}")


def given_block(first: int, size: int, setting: str) -> PortBlock:
    """The block that the user wants.

    Args:
        setting: where it was asked for, for the message.

    Raises:
        UserError: one of its ports is taken, or there is no such port.
    """
    ports = f"ports {first} to {first + size - 1} ({setting})"
    if first + size - 1 > 65535:
        raise UserError(f"{ports}: the last port of all is 65535")
    if block := _take(first, size):
        return block
    taken = next((port for port in range(first, first + size) if not _is_free(port, "")), first)
    raise UserError(
        f"{ports} are occupied on {socket.gethostname()}: something uses port {taken}; "
        f"choose others, or leave {setting} out"
    )


def _take(first: int, size: int) -> PortBlock | None:
    guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        guard.bind(("", first))  # without SO_REUSEADDR, so that nobody else can
    except OSError:
        guard.close()
        return None
    if all(_is_free(port, "") for port in range(first + 1, first + size)):
        return PortBlock(first, guard)
    guard.close()
    return None


def _is_free(port: int, address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _candidates(key: str, first: int, last: int) -> Iterator[int]:
    size = last - first + 1
    start = zlib.crc32(key.encode()) % size
    return (first + (start + step) % size for step in range(size))


def _last_port() -> int:
    try:
        lowest_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_ephemeral = 32768
    # A site that opened nearly the whole range for outgoing connections leaves no room below it.
    return lowest_ephemeral - 1 if lowest_ephemeral > _FIRST + 1000 else 65535
