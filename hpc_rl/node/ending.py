"""How the nodes of a job agree on its end: what node 0 does next (pure), and the waits of both sides, with deadlines.

A node reports when its part has ended. Node 0 decides when all have reported, or are lost, or are late. It writes the
agreed exit code to the file `.outcome`, which the job script uses, prints the cause, reads the log that it shows to the
end, and tells the others. Every node entry exits with that code, so it does not matter which of them Slurm sees first;
with 0 instead of 75, so that srun reports no error about a run that has saved (`entry.code_for_srun`).
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from hpc_rl.node.causes import TERMINATED, End, Kind, Outcome, outcome_of
from hpc_rl.node.peers import Coordinator, Participant, Peers, end_of_lost
from hpc_rl.node.rendezvous import POLL_S, Rendezvous, named
from hpc_rl.node.roll_call import SILENCE_S
from hpc_rl.run_dir import lost_file, outcome_file, read_outcome
from hpc_rl.system.files import write_atomically
from hpc_rl.system.processes import GRACE_S

LINGER_S = 300.0
"""How long processes of other nodes may run after those of node 0 have ended well."""
REPORT_S = SILENCE_S + 5.0
"""How long node 0 waits for the reports of nodes that it has asked to end: a lost node is known as such by then."""
ASKED_REPORT_S = 5.0
"""The same if Slurm ends the job: SAVING_S, ASKED_GRACE_S and this are less than Slurm's KillWait (30 s)."""
FOLLOW_S = REPORT_S + GRACE_S + 10.0
"""How long another node waits for the outcome after it has to end. Node 0 is slower only if it hangs."""
CAUSE_S = 1.0
"""How long a node waits for a file in which another one may have recorded why it ended."""
LEAVE_S = 20.0
"""How long node 0 waits until the others have left."""


class Step(Enum):
    WAIT = auto()
    ASK_TO_END = auto()
    DECIDE = auto()


@dataclass(frozen=True)
class Situation:
    """What node 0 sees after its own processes have ended."""

    everyone: int
    """Number of nodes of the job."""
    ends: Mapping[int, End]
    """Rank -> how a node ended. Lost ones have ended too."""
    present: Collection[int]
    """Ranks of the nodes that are connected."""
    ended_s: float
    """Seconds since node 0's own processes have ended."""
    asked_s: float | None
    """Seconds since node 0 has asked the others to end, or None if it has not."""
    is_ended_by_slurm: bool
    linger_s: float
    """How long the others may run after node 0."""


def next_step(seen: Situation) -> Step:
    """Return what node 0 does next."""
    if len(seen.ends) == seen.everyone:
        return Step.DECIDE
    if seen.asked_s is None:
        has_failed = any(end.is_failure for end in seen.ends.values())
        is_late = seen.ended_s >= seen.linger_s
        return Step.ASK_TO_END if has_failed or is_late or seen.is_ended_by_slurm else Step.WAIT
    is_late = seen.asked_s >= (ASKED_REPORT_S if seen.is_ended_by_slurm else REPORT_S)
    return Step.DECIDE if is_late or not set(seen.present) - set(seen.ends) else Step.WAIT


def settle(
    peers: Peers,
    own: End,
    asked_to_end: threading.Event,
    show: Callable[[End | None], None],
    linger_s: float = LINGER_S,
) -> int:
    """Report this node's end, agree with the others, and return the exit code of the job.

    Args:
        asked_to_end: set when Slurm or the user ends this process.
        show: prints the cause, or shows what is left of the log; called on the node that explains the end.
        linger_s: how long other nodes may run after node 0 has ended well; 0 if its end is that of the job.
    """
    if isinstance(peers, Coordinator):
        outcome = agree(peers, own, asked_to_end, linger_s)
        record(peers.rendezvous.attempt_dir, outcome)
        show(outcome.cause)  # before other tasks exit, on which srun comments
        peers.announce(outcome.exit_code)
        return outcome.exit_code
    return follow(peers, own, asked_to_end, show)


def agree(peers: Coordinator, own: End, asked_to_end: threading.Event, linger_s: float) -> Outcome:
    """Collect the ends of all nodes on node 0, and return the outcome."""
    peers.poll()  # what is reported already was before this node's end
    peers.report(own)
    began, asked_at = time.monotonic(), math.inf
    while True:
        peers.poll()
        now = time.monotonic()
        asked_s = now - asked_at if now >= asked_at else None
        everyone, ended_s = len(peers.rendezvous.nodes), now - began
        is_ended = asked_to_end.is_set()
        seen = Situation(everyone, peers.ends, peers.present, ended_s, asked_s, is_ended, linger_s)
        step = next_step(seen)
        if step is Step.DECIDE:
            break
        if step is Step.ASK_TO_END:
            if linger_s and not peers.must_end and not asked_to_end.is_set():
                _note_hanging(peers, linger_s)
            peers.ask_to_end()
            asked_at = now
        time.sleep(POLL_S)
    return outcome_of(explained(peers.ends, _failures(peers)))


def explained(ends: Mapping[int, End], failures: Mapping[int, int]) -> list[End]:
    """Return the ends with those of nodes that have printed themselves why they failed.

    Args:
        failures: rank -> exit code of these nodes.
    """
    found = [End(rank, failures[rank]) if rank in failures else end for rank, end in ends.items()]
    return [End(rank, code) for rank, code in failures.items() if rank not in ends] + found


def _failures(peers: Coordinator) -> dict[int, int]:
    """Return the failures that nodes have recorded, with some time for those whose connection ended."""
    deadline = time.monotonic() + CAUSE_S
    unexplained = {rank for rank, loss in peers.lost.items() if loss.machine_answers}
    while unexplained - (found := peers.rendezvous.failures()).keys() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return found


def _note_hanging(peers: Coordinator, linger_s: float) -> None:
    nodes = peers.rendezvous.nodes
    late = [rank for rank in range(len(nodes)) if rank not in peers.ends]
    where = named([nodes[rank] for rank in late])
    text = f"processes on {where} still run {linger_s:.0f} s after those of node {nodes[0]} ended: they hang"
    peers.ends[late[0]] = End(late[0], 1, text=text)


def record(attempt_dir: Path, outcome: Outcome) -> None:
    """Write the outcome for the job script, except if Slurm ended the job: then srun has the reason."""
    if outcome.cause is None or outcome.cause.kind is not Kind.TERMINATED:
        with contextlib.suppress(OSError):  # a full disk: all node entries exit with this code, and so does srun
            write_atomically(outcome_file(attempt_dir), f"{outcome.exit_code}\n")


def follow(peers: Participant, own: End, asked_to_end: threading.Event, show: Callable[[End | None], None]) -> int:
    """Report this node's end to node 0 and return the exit code that it announces, or one of our own if it is lost."""
    was_lost_before = peers.loss is not None
    peers.report(own)
    must_end_at = math.inf
    while peers.outcome is None and peers.loss is None:
        peers.poll()
        if own.is_failure or peers.must_end:
            must_end_at = min(must_end_at, time.monotonic() + FOLLOW_S)
        if asked_to_end.is_set():
            must_end_at = min(must_end_at, time.monotonic() + ASKED_REPORT_S + CAUSE_S)
        if time.monotonic() > must_end_at:
            break
        time.sleep(POLL_S)
    if peers.outcome is not None:
        return peers.outcome
    if peers.loss is None:
        show(own)
        return own.exit_code or TERMINATED
    lost = end_of_lost(peers.rendezvous, 0, peers.loss)
    outcome = outcome_of([lost, own] if was_lost_before else [own, lost])
    if not peers.loss.machine_answers:  # the job script is on that machine
        show(outcome.cause)
        return outcome.exit_code
    return _decide_without_lead(peers.rendezvous, outcome, show)


def _decide_without_lead(rendezvous: Rendezvous, outcome: Outcome, show: Callable[[End | None], None]) -> int:
    """Return the outcome after node 0's entry has ended: the first node that records one decides."""
    deadline = time.monotonic() + CAUSE_S
    while time.monotonic() < deadline:
        if (code := read_outcome(rendezvous.attempt_dir)) is not None:
            return code
        if (code := rendezvous.failures().get(0)) is not None:
            return code
        time.sleep(POLL_S)
    if create_once(outcome_file(rendezvous.attempt_dir), f"{outcome.exit_code}\n"):
        show(outcome.cause)
        return outcome.exit_code
    code = read_outcome(rendezvous.attempt_dir)
    return outcome.exit_code if code is None else code


def create_once(path: Path, text: str) -> bool:
    """Write a file unless it exists. Returns whether this call did. Atomic on a shared file system too (link(2))."""
    own = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with own.open("x") as file:
            file.write(text)
        os.link(own, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links, or a full disk
        return _create_in_place(path, text)
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
    return True


def _create_in_place(path: Path, text: str) -> bool:
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError:  # the other nodes cannot write it either
        return True
    return True


def leave(peers: Peers, asked_to_end: threading.Event) -> None:
    """Leave the others after this node is cleaned up. Node 0 leaves last, and records which nodes are lost."""
    if isinstance(peers, Coordinator):
        deadline = time.monotonic() + (CAUSE_S if asked_to_end.is_set() else LEAVE_S)
        while peers.present and time.monotonic() < deadline:
            peers.poll()
            time.sleep(POLL_S)
        nodes = peers.rendezvous.nodes
        lost = [nodes[rank] for rank, loss in sorted(peers.lost.items()) if not loss.machine_answers]
        if lost:  # read by the job script: srun would wait for them
            with contextlib.suppress(OSError):
                write_atomically(lost_file(peers.rendezvous.attempt_dir), "".join(f"{node}\n" for node in lost))
    peers.close()


def print_cause(cause: End | None) -> None:
    """Print the message of a failure, if it has one.

    It goes to standard output, as the log that node 0 shows: srun does not keep the order of two streams.
    """
    if cause is not None and cause.text:
        print(f"hpc-rl: {cause.text}", flush=True)
