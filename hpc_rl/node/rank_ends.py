"""How the ranks of one node ended, as the small parent process of each of them (`hpc_rl.node.rank`) records it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_rl.errors import EXIT_BAD_INPUT
from hpc_rl.node.causes import TERMINATED, End, Kind, first_cause, kind_of
from hpc_rl.node.rendezvous import POLL_S
from hpc_rl.system.deaths import KILLED, meaning_of, ran_out_of_memory
from hpc_rl.system.files import tail, write_atomically
from hpc_rl.system.processes import shell_code

RECORD_TIMEOUT_S = 15.0
"""How long a parent may take to end its rank and to record that."""
_RECORD_BYTES = 512
"""Bytes that are reserved for a record when its rank starts. When it ends, the disk may have no space or inodes."""


@dataclass(frozen=True)
class RankExit:
    """How one rank ended."""

    rank: int
    node_rank: int
    exit_code: int
    was_asked: bool
    """Whether it had been asked to end before."""
    time: float
    """Seconds of its node's monotonic clock. Times of different nodes cannot be compared."""


def log_path(attempt_dir: Path, node_rank: int, rank: int) -> Path:
    """Return the path of a rank's log."""
    return attempt_dir / f"node{node_rank}-rank{rank}.log"


def record_start(attempt_dir: Path, node_rank: int, rank: int) -> None:
    """Record that this process is the parent of a rank, and reserve the file for `record_exit`."""
    write_atomically(_started_file(attempt_dir, node_rank, rank), f"{os.getpid()}\n".ljust(_RECORD_BYTES))


def record_exit(attempt_dir: Path, ended: RankExit) -> None:
    """Record how a rank ended: write it into the file of `record_start`, and rename this file.

    Raises:
        OSError: the file cannot be written. A full disk does not cause this, unless the file system needs new space to
            overwrite a file.
    """
    started = _started_file(attempt_dir, ended.node_rank, ended.rank)
    with started.open("r+b") as file:
        file.readline()  # keep the parent's process id: other processes may be reading it
        file.write(json.dumps(asdict(ended)).encode())
    started.rename(started.with_suffix(".exit"))


def read_exits(attempt_dir: Path, node_rank: int | None = None) -> list[RankExit]:
    """Return the ranks of a node that have ended, in this order; or those of all nodes, in no order."""
    files = attempt_dir.glob(f".node{'*' if node_rank is None else node_rank}-rank*.exit")
    records = (file.read_text().partition("\n")[2] for file in files)
    return sorted((RankExit(**json.loads(record)) for record in records), key=lambda ended: ended.time)


def await_records(attempt_dir: Path, node_rank: int, ranks: Sequence[int]) -> list[int]:
    """Wait until the parents of these ranks of this node have ended. Returns those that left no record."""
    deadline = time.monotonic() + RECORD_TIMEOUT_S
    while True:
        recorded = {ended.rank for ended in read_exits(attempt_dir, node_rank)}
        open_ranks = [rank for rank in ranks if rank not in recorded]
        running = [rank for rank in open_ranks if _is_running(attempt_dir, node_rank, rank)]
        if not running or time.monotonic() > deadline:
            return [rank for rank in open_ranks if _started_file(attempt_dir, node_rank, rank).exists()]
        time.sleep(POLL_S)


def node_end(
    attempt_dir: Path, node: str, node_rank: int, ranks: Sequence[int], agent_code: int, was_asked: bool
) -> End:
    """Return how this node's part of a torchrun job ended, after its torchrun has.

    Args:
        ranks: the node's ranks.
        agent_code: how torchrun ended; negative if a signal did.
        was_asked: whether this node's entry has asked it to end.
    """
    unrecorded = await_records(attempt_dir, node_rank, ranks)
    exits = read_exits(attempt_dir, node_rank)
    ends = [] if was_asked else agent_ends(node_rank, node, agent_code)
    ends += [parent_end(node_rank, node, rank) for rank in unrecorded]
    ends += [rank_end(attempt_dir, node, ended) for ended in exits]
    if cause := first_cause(ends):
        return cause
    if was_asked and len(exits) < len(ranks):
        return End(node_rank, TERMINATED, Kind.TERMINATED)
    if agent_code and not was_asked and not any(end.exit_code for end in ends):
        return unexplained_end(attempt_dir, node_rank, node, agent_code)
    return End(node_rank, max((end.exit_code for end in ends), default=0))


def agent_ends(node_rank: int, node: str, code: int) -> list[End]:
    """Return torchrun's end if a signal ended it. Its ranks end with it."""
    if code >= 0:
        return []
    text = f"torchrun on node {node} was killed ({_named(-code)}), and its ranks with it"
    return [End(node_rank, shell_code(code), text=text, process="torchrun")]


def parent_end(node_rank: int, node: str, rank: int) -> End:
    """Return the end of a rank's parent that was killed before it could record anything. The rank ends with it."""
    text = f"the parent process of rank {rank} on node {node} (hpc_rl.node.rank) was killed, and the rank with it"
    return End(node_rank, KILLED, text=text, process=f"the parent of rank {rank}")


def rank_end(attempt_dir: Path, node: str, ended: RankExit) -> End:
    """Return the end of a rank with its message. Rank 0's log is shown while it runs."""
    log = log_path(attempt_dir, ended.node_rank, ended.rank)
    last_lines = tail(log)
    kind = kind_of(ended.exit_code, ended.was_asked, last_lines)
    end_of_log = "" if ended.rank == 0 else last_lines
    process = f"rank {ended.rank}"
    if kind is Kind.TERMINATED or (ended.exit_code == EXIT_BAD_INPUT and not end_of_log):  # rank 0 has printed it
        return End(ended.node_rank, ended.exit_code, kind, process=process)
    meaning = meaning_of(ended.exit_code, ran_out_of_memory(os.environ), "request more --mem, or use less in each rank")
    text = f"{process} on node {node} failed with exit code {ended.exit_code}{meaning}; its log is {log}"
    text += f" and ends:\n{end_of_log}" if end_of_log else ""
    return End(ended.node_rank, ended.exit_code, kind, text, process)


def unexplained_end(attempt_dir: Path, node_rank: int, node: str, code: int) -> End:
    """Return the end of a torchrun that failed by itself."""
    log = attempt_dir / f"node{node_rank}.log"
    text = f"torchrun on node {node} ended with exit code {code}; the end of {log}:\n{tail(log)}"
    return End(node_rank, code, text=text, process="torchrun")


def _started_file(attempt_dir: Path, node_rank: int, rank: int) -> Path:
    return attempt_dir / f".node{node_rank}-rank{rank}.started"


def _is_running(attempt_dir: Path, node_rank: int, rank: int) -> bool:
    try:
        pid = int(_started_file(attempt_dir, node_rank, rank).read_text().partition("\n")[0])
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, ValueError):
        return False


def _named(number: int) -> str:
    try:
        return f"signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
