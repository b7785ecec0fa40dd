"""The roll call: one TCP connection from each node's entry to that of node 0, which carries lines of text.

The kernel closes a connection when its process ends for any reason, and if the other machine has not answered for 25 s
(tcp(7), TCP_KEEPINTVL). So a lost node is detected without heartbeats, which a busy process could miss.
"""

from __future__ import annotations

import hmac
import resource
import selectors
import socket
import time
from dataclasses import dataclass

from hpc_rl.errors import UserError

IDLE_S, INTERVAL_S, PROBES = 5, 5, 4
SILENCE_S = IDLE_S + INTERVAL_S * PROBES
HELLO_S = 5
"""Time within which a caller must identify itself. If too many have not, the oldest are disconnected."""
_MAX_UNKNOWN = 64
OTHER_FILES = 256
"""Files that the process of node 0 may have open besides the connections of the roll call."""
_MAX_UNKNOWN_BYTES, _MAX_BYTES = 1000, 1 << 18
"""Most that a caller may send at once before it has identified itself, and a node."""


@dataclass(frozen=True)
class Loss:
    """How a connection ended."""

    how: str
    machine_answers: bool
    """Whether the other side closed it: the machine answers, but its process has ended."""


class RollCall:
    """The side of node 0. Nothing here blocks."""

    def __init__(self, address: str, port: int, nodes: int, secret: bytes) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
            UserError: a process may not have enough open files for so many connections.
        """
        allow_connections(nodes)
        self._listener = socket.create_server((address, port), backlog=nodes + _MAX_UNKNOWN)
        self._listener.setblocking(False)
        self._expected = {signature(secret, rank): rank for rank in range(1, nodes)}
        self._unknown: list[_Connection] = []
        self._present: dict[int, _Connection] = {}
        self._events = selectors.DefaultSelector()
        """For the nodes that are present: of a thousand, only a few have sent something since the last look."""
        self.closed: dict[int, Loss] = {}
        """Rank -> how its connection ended, in the order in which node 0 saw it."""

    @property
    def present(self) -> set[int]:
        """Ranks of the nodes that are connected."""
        return set(self._present)

    @property
    def seen(self) -> set[int]:
        """Ranks of the nodes that have connected, including those that have left; and node 0."""
        return {0, *self._present, *self.closed}

    def poll(self) -> list[tuple[int, str]]:
        """Return the lines received since the last call, each with the rank of its node."""
        self._accept()
        received: list[tuple[int, str]] = []
        strangers = []
        for caller in self._unknown:
            lines = caller.first_lines()
            if lines and lines[0] in self._expected:
                rank = self._expected.pop(lines[0])
                self._present[rank] = caller
                caller.report_to(self._events, rank)
                received += [(rank, line) for line in lines[1:]]
            elif lines or caller.closed is not None or caller.age_s > HELLO_S:
                caller.close()
            else:
                strangers.append(caller)
        for caller in strangers[:-_MAX_UNKNOWN]:
            caller.close()
        self._unknown = strangers[-_MAX_UNKNOWN:]
        for rank in [key.data for key, _ in self._events.select(0)]:
            received += [(rank, line) for line in self._present[rank].lines()]
        for rank, caller in list(self._present.items()):
            if caller.closed is not None:
                self.closed[rank] = caller.closed
                caller.close()
                del self._present[rank]
        return received

    def tell_all(self, line: str) -> None:
        """Send a line to every node that is connected."""
        for caller in self._present.values():
            caller.send(line)

    def close(self) -> None:
        for caller in [*self._unknown, *self._present.values()]:
            caller.close()
        self._events.close()
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

    def send(self, line: str) -> None:
        """Send a line to node 0."""
        self._connection.send(line)

    def poll(self) -> list[str]:
        """Return the lines received since the last call."""
        return self._connection.lines()

    @property
    def closed(self) -> Loss | None:
        """How the connection to node 0 ended, or None."""
        return self._connection.closed

    def close(self) -> None:
        self._connection.close()


def allow_connections(nodes: int) -> None:
    """Raise this process's limit on open files, so that it can have a connection to each node of a job.

    Raises:
        UserError: the hard limit does not allow so many.
    """
    wanted = nodes + _MAX_UNKNOWN + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UserError(
            f"a job on {nodes:,} nodes needs {wanted:,} open files on its first node, but a process may have at most "
            f"{hard:,} (ulimit -Hn): use fewer nodes, or ask your site's support for a higher limit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def signature(secret: bytes, rank: int) -> str:
    """Return a proof that a caller can read the job's secret, without revealing it."""
    return hmac.digest(secret, f"hpc-rl node {rank}".encode(), "sha256").hex()


class _Connection:
    """A connection that carries lines. Never blocks."""

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
        self._text = b""
        self._events: selectors.BaseSelector | None = None
        self.closed: Loss | None = None

    def report_to(self, events: selectors.BaseSelector, data: object) -> None:
        """Let a selector return `data`, until `close`, if there is something to read or the connection has ended."""
        events.register(self._socket, selectors.EVENT_READ, data)
        self._events = events

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began

    def send(self, text: str) -> None:
        try:
            self._socket.sendall(f"{text}\n".encode())
        except OSError as error:
            self.closed = self.closed or _loss(error)

    def first_lines(self) -> list[str]:
        """Return the complete lines so far, of which a caller that has not identified itself sends only a few."""
        return self._received(_MAX_UNKNOWN_BYTES, until_line=True)

    def lines(self) -> list[str]:
        """Return the complete lines received since the last call."""
        return self._received(_MAX_BYTES)

    def _received(self, longest: int, until_line: bool = False) -> list[str]:
        while self.closed is None and not (until_line and b"\n" in self._text):
            try:
                new = self._socket.recv(_MAX_UNKNOWN_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                self.closed = _loss(error)
                break
            self._text += new
            if not new:
                self.closed = Loss("its processes ended", machine_answers=True)
            elif len(self._text) > longest:
                self.closed = Loss("it sent too much data", machine_answers=True)
        *complete, self._text = self._text.split(b"\n")
        return [line.decode(errors="replace") for line in complete]

    def close(self) -> None:
        if self._events is not None:
            self._events.unregister(self._socket)
            self._events = None
        self._socket.close()


def _loss(error: OSError) -> Loss:
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return Loss("its processes ended", machine_answers=True)
    if isinstance(error, TimeoutError):
        return Loss(f"it has not answered for {SILENCE_S} s", machine_answers=False)
    return Loss(f"its connection broke ({error.strerror})", machine_answers=False)
