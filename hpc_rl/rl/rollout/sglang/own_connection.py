"""HTTP calls that reach only a process of this user on this node.

/proc/net/tcp shows which user has the other end of a TCP connection within the node (proc_pid_net(5)).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.request import HTTPHandler, ProxyHandler, Request

from hpc_rl.rl.rollout.http_calls import HttpClient

TABLE = Path("/proc/net/tcp")
ANY = ("0.0.0.0", 0)
LISTENING = "0A"
"""The state TCP_LISTEN."""
NOT_ACCEPTED = "0"
"""The inode of a connection that its listener has not accepted yet. Its user may be shown as 0."""
Address = tuple[str, int]


def own_client(url: str, key: str) -> HttpClient:
    """Return a client that uses no proxy, and sends nothing unless a process of this user has the IPv4 address."""
    return HttpClient(url, key, ProxyHandler({}), _OwnServers())


class _OwnConnection(HTTPConnection):
    """Connects only to a process of this user.

    Without the checks, anybody on the node could take the port before the server listens, or after its end, receive the
    key and answer. A server listens once in its life. So if it did before and after the connection was made, no other
    listener has the connection.
    """

    def connect(self) -> None:
        server = (self.host, self.port)
        is_own = is_own_listener(server)
        if is_own:
            super().connect()
            is_own = is_own_listener(server) and is_own_peer(server, self.sock.getsockname())
        if not is_own:
            raise ConnectionRefusedError(f"no process of this user listens at {self.host}:{self.port}")


class _OwnServers(HTTPHandler):
    def http_open(self, request: Request) -> HTTPResponse:
        return self.do_open(_OwnConnection, request)


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
