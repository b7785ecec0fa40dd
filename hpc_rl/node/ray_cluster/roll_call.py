"""Who of the nodes is there: one TCP connection from each node's entry to node 0's.

The kernel closes a connection when its process ends, however it ends, and gives it up when the other machine has not
answered for 25 s (tcp(7), TCP_KEEPINTVL). So a lost node shows without heartbeats, which a busy process could miss.
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
"""How long a connection may take to say who it is; the first to come go first when there are too many."""
_MOST_UNKNOWN = 64
_MOST_BYTES = 1000


@dataclass(frozen=True)
class Loss:
    """How a connection ended."""

    how: str
    machine_answers: bool
    """Whether it was closed from the other side: the machine is there, the process is not."""


class RollCall:
    """Node 0's side. `poll` never waits."""

    def __init__(self, address: str, port: int, nodes: int, secret: bytes) -> None:
        self._listener = socket.create_server((address, port), backlog=nodes + _MOST_UNKNOWN)
        self._listener.setblocking(False)
        self._expected = {signature(secret, rank): rank for rank in range(1, nodes)}
        self._unknown: list[_Line] = []
        self._present: dict[int, _Line] = {}
        self.up: set[int] = {0}
        """Ranks of the nodes that are in the Ray cluster; the first is not asked."""
        self.lost: dict[int, Loss] = {}
        """Rank -> how its connection ended, in the order in which they did."""

    @property
    def seen(self) -> set[int]:
        """Ranks of the nodes that have called, here or lost."""
        return {0, *self._present, *self.lost}

    def poll(self) -> None:
        """Take in what has come since the last call."""
        self._accept()
        strangers = []
        for line in self._unknown:
            words = line.words()
            if words and words[0] in self._expected and line.closed is None:
                self._present[self._expected.pop(words[0])] = line
            elif words or line.closed is not None or line.age_s > HELLO_S:
                line.close()
            else:
                strangers.append(line)
        for line in strangers[:-_MOST_UNKNOWN]:
            line.close()
        self._unknown = strangers[-_MOST_UNKNOWN:]
        for rank, line in list(self._present.items()):
            if "up" in line.words():
                self.up.add(rank)
            if line.closed is not None:
                self.lost[rank] = line.closed
                del self._present[rank]

    def dismiss(self, code: int) -> None:
        """Tell every node that the job ends, and with which exit code."""
        for line in self._present.values():
            line.say(f"end {code}")

    @property
    def all_left(self) -> bool:
        return not self._present

    def close(self) -> None:
        for line in [*self._unknown, *self._present.values()]:
            line.close()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_MOST_UNKNOWN):
            try:
                connection, _address = self._listener.accept()
            except OSError:
                break
            self._unknown.append(_Line(connection))


class Place:
    """Another node's side."""

    def __init__(self, address: str, port: int, rank: int, secret: bytes, timeout_s: float) -> None:
        """Raises OSError: node 0 cannot be reached."""
        self._line = _Line(socket.create_connection((address, port), timeout=timeout_s))
        self._line.say(signature(secret, rank))

    def say_up(self) -> None:
        self._line.say("up")

    def dismissed(self) -> int | None:
        """The job's exit code once node 0 has ended the job."""
        words = self._line.words()
        return int(words[words.index("end") + 1]) if "end" in words else None

    @property
    def lost(self) -> Loss | None:
        """How the connection to node 0 ended, if it did."""
        return self._line.closed

    def close(self) -> None:
        self._line.close()


def signature(secret: bytes, rank: int) -> str:
    """Proves that a caller can read the job's token, and does not show it."""
    return hmac.digest(secret, f"hpc-rl node {rank}".encode(), "sha256").hex()


class _Line:
    """A connection over which words come and go. Never waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        for option, value in (
            (socket.TCP_KEEPIDLE, IDLE_S),
            (socket.TCP_KEEPINTVL, INTERVAL_S),
            (socket.TCP_KEEPCNT, PROBES),
            (socket.TCP_USER_TIMEOUT, SILENCE_S * 1000),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection = connection
        self._began = time.monotonic()
        self._text = ""
        self.closed: Loss | None = None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        try:
            self._connection.sendall(f"{text}\n".encode())
        except OSError as error:
            self.closed = self.closed or _loss(error)

    def words(self) -> Sequence[str]:
        """All words of finished lines so far."""
        while self.closed is None:
            try:
                new = self._connection.recv(_MOST_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self.closed = _loss(error)
                break
            self._text += new.decode(errors="replace")
            if not new:
                self.closed = Loss("its processes ended", machine_answers=True)
            elif len(self._text) > _MOST_BYTES:
                self.closed = Loss("it talks too much", machine_answers=True)
        return self._text[: self._text.rfind("\n") + 1].split()

    def close(self) -> None:
        self._connection.close()


def _loss(error: OSError) -> Loss:
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return Loss("its processes ended", machine_answers=True)
    if isinstance(error, TimeoutError):
        return Loss(f"it has not answered for {SILENCE_S} s", machine_answers=False)
    return Loss(f"its connection broke ({error.strerror})", machine_answers=False)
