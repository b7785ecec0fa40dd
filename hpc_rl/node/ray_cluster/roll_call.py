"""The roll call: one TCP connection from each node's entry to that of node 0.

The kernel closes a connection when its process ends for any reason, and if the other machine has not answered for 25 s
(tcp(7), TCP_KEEPINTVL). So a lost node is detected without heartbeats, which a busy process could miss.
"""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

IDLE_S, INTERVAL_S, PROBES = 5, 5, 4
SILENCE_S = IDLE_S + INTERVAL_S * PROBES
HELLO_S = 5
"""Time within which a caller must identify itself. If too many have not, the oldest are disconnected."""
_MAX_UNKNOWN = 64
_MAX_BYTES = 1000


@dataclass(frozen=True)
class Loss:
    """How a connection ended."""

    how: str
    machine_answers: bool
    """Whether the other side closed it: the machine answers, but its process has ended."""


class RollCall:
    """The side of node 0. `poll` never blocks."""

    def __init__(self, address: str, port: int, nodes: int, secret: bytes) -> None:
        self._listener = socket.create_server((address, port), backlog=nodes + _MAX_UNKNOWN)
        self._listener.setblocking(False)
        self._expected = {signature(secret, rank): rank for rank in range(1, nodes)}
        self._unknown: list[_Connection] = []
        self._present: dict[int, _Connection] = {}
        self.up: set[int] = {0}
        """Ranks of the nodes that have joined the Ray cluster. Node 0 is always included."""
        self.lost: dict[int, Loss] = {}
        """Rank -> how its connection ended, ordered by time."""

    @property
    def seen(self) -> set[int]:
        """Ranks of the nodes that have connected, including lost ones."""
        return {0, *self._present, *self.lost}

    def poll(self) -> None:
        """Process everything received since the last call."""
        self._accept()
        strangers = []
        for caller in self._unknown:
            words = caller.words()
            if words and words[0] in self._expected and caller.closed is None:
                self._present[self._expected.pop(words[0])] = caller
            elif words or caller.closed is not None or caller.age_s > HELLO_S:
                caller.close()
            else:
                strangers.append(caller)
        for caller in strangers[:-_MAX_UNKNOWN]:
            caller.close()
        self._unknown = strangers[-_MAX_UNKNOWN:]
        for rank, caller in list(self._present.items()):
            if "up" in caller.words():
                self.up.add(rank)
            if caller.closed is not None:
                self.lost[rank] = caller.closed
                del self._present[rank]

    def dismiss(self, code: int) -> None:
        """Tell every node that the job ends, with its exit code."""
        for caller in self._present.values():
            caller.send(f"end {code}")

    @property
    def all_left(self) -> bool:
        """Whether all other nodes have closed their connections."""
        return not self._present

    def close(self) -> None:
        for caller in [*self._unknown, *self._present.values()]:
            caller.close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_MAX_UNKNOWN):
            try:
                peer, _address = self._listener.accept()
            except OSError:
                break
            self._unknown.append(_Connection(peer))


class Caller:
    """The side of another node."""

    def __init__(self, address: str, port: int, rank: int, secret: bytes, timeout_s: float) -> None:
        """Connect to node 0.

        Raises:
            OSError: it cannot be reached.
        """
        self._connection = _Connection(socket.create_connection((address, port), timeout=timeout_s))
        self._connection.send(signature(secret, rank))

    def report_up(self) -> None:
        """Report that this node has joined the Ray cluster."""
        self._connection.send("up")

    def dismissed(self) -> int | None:
        """Return the job's exit code, or None while node 0 has not ended the job."""
        words = self._connection.words()
        return int(words[words.index("end") + 1]) if "end" in words else None

    @property
    def lost(self) -> Loss | None:
        """How the connection to node 0 ended, or None."""
        return self._connection.closed

    def close(self) -> None:
        self._connection.close()


def signature(secret: bytes, rank: int) -> str:
    """Return a proof that a caller can read the job's token, without revealing the token."""
    return hmac.digest(secret, f"hpc-rl node {rank}".encode(), "sha256").hex()


class _Connection:
    """A connection that carries lines of words. Never blocks."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        for option, value in (
            (socket.TCP_KEEPIDLE, IDLE_S),
            (socket.TCP_KEEPINTVL, INTERVAL_S),
            (socket.TCP_KEEPCNT, PROBES),
            (socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
        ):
            peer.setsockopt(socket.IPPROTO_TCP, option, value)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = peer
        self._began = time.monotonic()
        self._text = ""
        self.closed: Loss | None = None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began

    def send(self, text: str) -> None:
        try:
            self._socket.sendall(f"{text}\n".encode())
        except OSError as error:
            self.closed = self.closed or _loss(error)

    def words(self) -> Sequence[str]:
        """Return all words of the complete lines so far."""
        while self.closed is None:
            try:
                new = self._socket.recv(_MAX_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self.closed = _loss(error)
                break
            self._text += new.decode(errors="replace")
            if not new:
                self.closed = Loss("its processes ended", machine_answers=True)
            elif len(self._text) > _MAX_BYTES:
                self.closed = Loss("it sent too much data", machine_answers=True)
        return self._text[: self._text.rfind("\n") + 1].split()

    def close(self) -> None:
        self._socket.close()


def _loss(error: OSError) -> Loss:
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return Loss("its processes ended", machine_answers=True)
    if isinstance(error, TimeoutError):
        return Loss(f"it has not answered for {SILENCE_S} s", machine_answers=False)
    return Loss(f"its connection broke ({error.strerror})", machine_answers=False)
