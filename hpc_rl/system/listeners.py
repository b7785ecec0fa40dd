"""Which user has the other end of a TCP connection within this node (proc_pid_net(5), /proc/net/tcp)."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

TABLE = Path("/proc/net/tcp")
ANY = ("0.0.0.0", 0)
LISTENING = "0A"
"""The state TCP_LISTEN."""
NOT_ACCEPTED = "0"
"""The inode of a connection that its listener has not accepted yet. Its user may be shown as 0."""
Address = tuple[str, int]


def is_own_listener(address: Address, table: Path = TABLE) -> bool:
    """Return whether a process of this user listens at exactly this IPv4 address and port.

    Linux prefers a listener at the exact address to one at all addresses, and never lets two users listen at the same
    address and port (socket(7), SO_REUSEPORT).
    """
    return any(state == LISTENING and owner == os.getuid() for state, owner, _ in _rows(address, ANY, table))


def is_own_peer(peer: Address, own: Address, table: Path = TABLE) -> bool:
    """Return whether the other end of a connection is a process of this user, or waits for its listener.

    A socket of another user that does not listen can have the address and port of a listener, and a connection that it
    opens itself to `own` (RFC 9293, simultaneous open).
    """
    return any(owner == os.getuid() or inode == NOT_ACCEPTED for _, owner, inode in _rows(peer, own, table))


def _rows(local: Address, remote: Address, table: Path) -> Iterator[tuple[str, int, str]]:
    """Yield state, user and inode of the sockets with these two ends."""
    ends = f" {_shown(local)} {_shown(remote)} "
    with table.open() as lines:
        for line in lines:
            if ends in line:
                words = line.split()
                yield words[3], int(words[7]), words[9]


def _shown(address: Address) -> str:
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"
