"""Which user listens at a port of this node (proc_pid_net(5), /proc/net/tcp)."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

TABLE = Path("/proc/net/tcp")
LISTENING = "0A"
"""The state TCP_LISTEN."""


def is_own_listener(address: str, port: int, table: Path = TABLE) -> bool:
    """Return whether a process of this user listens at exactly this IPv4 address and port.

    Linux prefers a listener at the exact address to one at all addresses, and never lets two users listen at the same
    address and port (socket(7), SO_REUSEPORT). So if this returns True before and after a connection is made, no other
    listener has it.
    """
    number = int.from_bytes(socket.inet_aton(address), sys.byteorder)
    local = f"{number:08X}:{port:04X}"
    with table.open() as lines:
        for line in lines:
            _, place, _, state, _, _, _, owner, *_ = line.split()
            if (place, state) == (local, LISTENING):
                return int(owner) == os.getuid()
    return False
