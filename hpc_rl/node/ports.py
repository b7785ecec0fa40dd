"""TCP ports that do not collide: not with other jobs on the node, and not with outgoing connections."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

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
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise UserError(f"no free TCP port between {_FIRST} and {last} on {socket.gethostname()}")


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
