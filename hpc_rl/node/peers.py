"""The other nodes of a job, as one node sees them: who is here, who is lost, and how they ended. For both job types.

Node 0 coordinates: the others report to it over the roll call how they end, and it tells them to end and the exit code
that all of them take. A job on one node has no roll call, and listens nowhere.
"""

from __future__ import annotations

import json
import secrets
import threading
import time

from hpc_rl.errors import UserError
from hpc_rl.node.causes import TERMINATED, End
from hpc_rl.node.network import free_port
from hpc_rl.node.rendezvous import POLL_S, Rendezvous
from hpc_rl.node.roll_call import Caller, Loss, RollCall
from hpc_rl.system.deaths import KILLED
from hpc_rl.system.files import write_atomically

PLACE = ".roll-call"
"""File in the attempt's folder with address, port and secret of the roll call. Only its owner can read it."""
CONNECT_TIMEOUT_S = 10
LOOK_S = 1.0
"""Interval between looks for nodes that failed before they had called."""
_TRIES = 5


class JoinAborted(Exception):
    """The job ended before this node had met the others, which is no news to the user."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class Coordinator:
    """The side of node 0."""

    def __init__(self, rendezvous: Rendezvous, roll: RollCall | None = None) -> None:
        """Without a roll call, the job has one node."""
        self.rendezvous = rendezvous
        self._roll = roll
        self.up = {0}
        """Ranks of the nodes that have reported to be ready."""
        self.ends: dict[int, End] = {}
        """Rank -> how the node ended, in the order in which node 0 saw it. A lost node has ended too."""
        self.lost: dict[int, Loss] = {}
        self._next_look = 0.0

    @property
    def seen(self) -> set[int]:
        """Ranks of the nodes that have ever been here."""
        return self._roll.seen if self._roll else {0}

    @property
    def present(self) -> set[int]:
        """Ranks of the other nodes that are still here."""
        return self._roll.present if self._roll else set()

    @property
    def must_end(self) -> bool:
        """Whether this node has to end its processes, because another one failed or is lost."""
        return any(end.is_failure for end in self.ends.values())

    def poll(self) -> None:
        """Process what the other nodes have reported since the last call."""
        if self._roll is None:
            return
        if len(self.seen) < len(self.rendezvous.nodes) and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            for rank, code in self.rendezvous.failures().items():
                self.ends.setdefault(rank, End(rank, code))
        for rank, line in self._roll.poll():
            word, _, rest = line.partition(" ")
            if word == "up":
                self.up.add(rank)
            elif word == "end":
                self.ends.setdefault(rank, End.from_line(rest))
        for rank, loss in self._roll.closed.items():
            if rank not in self.ends:
                self.lost[rank] = loss
                self.ends[rank] = end_of_lost(self.rendezvous, rank, loss)

    def report(self, end: End) -> None:
        """Add this node's own end."""
        self.ends.setdefault(end.node_rank, end)

    def ask_to_end(self) -> None:
        """Ask the other nodes to end their processes and to report how they ended."""
        if self._roll:
            self._roll.tell_all("stop")

    def announce(self, exit_code: int) -> None:
        """Tell the other nodes the exit code of the job."""
        if self._roll:
            self._roll.tell_all(f"outcome {exit_code}")

    def close(self) -> None:
        if self._roll:
            self._roll.close()
            (self.rendezvous.attempt_dir / PLACE).unlink(missing_ok=True)


class Participant:
    """The side of any other node."""

    def __init__(self, rendezvous: Rendezvous, caller: Caller) -> None:
        self.rendezvous = rendezvous
        self._caller = caller
        self._was_asked = False
        self.outcome: int | None = None
        """The job's exit code, when node 0 has announced it."""

    @property
    def loss(self) -> Loss | None:
        """How node 0 was lost, or None."""
        return self._caller.closed

    @property
    def must_end(self) -> bool:
        """Whether this node has to end its processes."""
        return self._was_asked or self.outcome is not None or self.loss is not None

    def poll(self) -> None:
        """Process what node 0 has sent since the last call."""
        for line in self._caller.poll():
            word, _, rest = line.partition(" ")
            if word == "stop":
                self._was_asked = True
            elif word == "outcome":
                self.outcome = int(rest)

    def report_up(self) -> None:
        """Report that this node is ready."""
        self._caller.send("up")

    def report(self, end: End) -> None:
        """Report how this node ended."""
        self._caller.send(f"end {end.to_line()}")

    def close(self) -> None:
        self._caller.close()


Peers = Coordinator | Participant


def coordinate(rendezvous: Rendezvous, address: str, port: int | None = None) -> Coordinator:
    """Open the roll call of a job on node 0 and publish where it is.

    Args:
        address: IPv4 address of node 0 on the network between the nodes.
        port: None for a random one.

    Raises:
        UserError: no port can be opened.
    """
    if len(rendezvous.nodes) == 1:
        return Coordinator(rendezvous)
    secret = secrets.token_hex(32)
    for left in reversed(range(_TRIES)):
        chosen = free_port(address) if port is None else port
        try:
            roll = RollCall(address, chosen, len(rendezvous.nodes), secret.encode())
            break
        except OSError as error:  # another process has taken the port meanwhile
            if not left or port is not None:
                raise UserError(
                    f"node {rendezvous.node} cannot listen on {address}:{chosen} for the roll call of its nodes: "
                    f"{error.strerror}"
                ) from error
    place = {"address": address, "port": chosen, "secret": secret}
    write_atomically(rendezvous.attempt_dir / PLACE, json.dumps(place), forbidden=0o077)
    return Coordinator(rendezvous, roll)


def join(rendezvous: Rendezvous, timeout_s: float, asked_to_end: threading.Event | None = None) -> Participant:
    """Connect to the roll call of node 0.

    Args:
        asked_to_end: set when Slurm or the user ends this process.

    Raises:
        UserError: node 0 has not opened it in time, cannot be reached, or has failed.
    """

    def check() -> None:
        if asked_to_end is not None and asked_to_end.is_set():
            raise JoinAborted(TERMINATED)
        if 0 in (failures := rendezvous.failures()):  # it has printed why
            raise JoinAborted(failures[0])

    deadline = time.monotonic() + timeout_s
    path = rendezvous.await_file(PLACE, timeout_s, check)
    place = json.loads(path.read_text())
    while True:
        try:
            where = (place["address"], place["port"])
            return Participant(
                rendezvous, Caller(*where, rendezvous.node_rank, place["secret"].encode(), timeout_s=CONNECT_TIMEOUT_S)
            )
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"node {rendezvous.node} cannot reach node {rendezvous.nodes[0]} at {where[0]}:{where[1]}: "
                    f"{error.strerror or error}; check for a firewall between them, or set slurm.interface to another "
                    "network"
                ) from error
        check()
        time.sleep(POLL_S)


def end_of_lost(rendezvous: Rendezvous, rank: int, loss: Loss) -> End:
    """Return the end of a node whose connection ended without a report."""
    node, log = rendezvous.nodes[rank], rendezvous.log(rank)
    if not loss.machine_answers:
        return End(rank, 1, text=f"node {node} is lost: {loss.how}; its log is {log}", process=f"node {node}")
    process = f"the node entry on node {node}"
    text = f"{process} was killed: {loss.how} without a report; its log is {log}"
    return End(rank, KILLED, text=text, process=process)
