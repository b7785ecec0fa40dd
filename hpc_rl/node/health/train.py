"""The training checks of the health check (`hpc-rl doctor --train`), on one node.

The checks run in sessions: the processes of a real job, which run one check after another. If a check crashes or hangs,
the session ends, the check has failed, and a new session begins with the next one. Node 0 leads: it announces each
session in the shared folder, watches the results and decides when a session is over. The other nodes follow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_rl.formats.acceptance import (
    ENV_SCRATCH,
    FOLDER,
    LAUNCHERS,
    Launcher,
    Line,
    append,
    read,
    results_file,
    scratch_folder,
    unfinished,
)
from hpc_rl.node.entry import print_error
from hpc_rl.node.health.trials import common_options, last_words
from hpc_rl.run_dir import ENV_ATTEMPT_DIR
from hpc_rl.slurm.allocation import Allocation
from hpc_rl.system.files import open_to_append, read_json, write_atomically
from hpc_rl.system.processes import GRACE_S, end, shell_code, start
from hpc_rl.system.scratch import remove_recorded, remove_scratch

POLL_S = 0.2
BETWEEN_CHECKS_S = 180
"""Longest time in which no check runs: processes start and import their libraries."""
TOTAL_S = 4 * 3600
"""Longest time in which a node waits for node 0. The walltime usually ends it sooner."""
MOST_SESSIONS = 40
_END = "end"


@dataclass(frozen=True)
class Announcement:
    """What node 0 writes for each session."""

    launcher: str
    """The node entry that starts the processes, or `end`."""
    scratch: str


@dataclass(frozen=True)
class SessionEnd:
    """How the processes of a session ended on a node."""

    exit_code: int
    said: str
    """The error message, if they failed."""


@dataclass(frozen=True)
class SessionNode:
    """One node of the run."""

    allocation: Allocation
    attempt_dir: Path
    options: argparse.Namespace
    ray_options: Sequence[str]

    @property
    def folder(self) -> Path:
        return self.attempt_dir / FOLDER

    @property
    def results(self) -> Path:
        return results_file(self.attempt_dir)

    def announcement(self, number: int) -> Path:
        return self.folder / f"session-{number}.json"

    def session(self, number: int) -> Path:
        """The folder of a session's logs and run directories."""
        return self.folder / f"session-{number}"

    def over(self, number: int) -> Path:
        """The file with which node 0 ends a session."""
        return self.folder / f"session-{number}.over"

    def ended(self, number: int, rank: int) -> Path:
        """The file in which a node writes how its processes ended."""
        return self.folder / f"session-{number}.node{rank}.json"


def run_training_checks(
    allocation: Allocation, attempt_dir: Path, options: argparse.Namespace, ray_options: Sequence[str]
) -> None:
    """Run all checks on this node, together with the other nodes. Node 0 writes the results."""
    node = SessionNode(allocation, attempt_dir, options, ray_options)
    scratch = scratch_folder(os.environ, allocation.job_id)
    try:
        if allocation.is_head:
            lead(node, scratch)
        else:
            scratch = follow(node, scratch)
    finally:
        remove_scratch(scratch)


def lead(node: SessionNode, scratch: Path) -> None:
    """Run sessions until every check has ended."""
    node.folder.mkdir(mode=0o700)
    number = 0
    try:
        for launcher in LAUNCHERS:
            while number < MOST_SESSIONS and has_more(read(node.results), launcher):
                number += 1
                before = len(ended_names(node.results))
                reason = run_session(node, number, launcher, scratch)
                settle(node.results, launcher, reason, progress=len(ended_names(node.results)) > before)
    finally:
        announce(node, number + 1, Announcement(_END, str(scratch)))


def follow(node: SessionNode, scratch: Path) -> Path:
    """Take part in the sessions that node 0 announces. Returns the folder that it named for temporary files."""
    deadline = time.monotonic() + TOTAL_S
    for number in range(1, MOST_SESSIONS + 2):
        path = node.announcement(number)
        while not (found := read_json(path)):
            if time.monotonic() > deadline:
                print_error(f"node {node.allocation.node} waited {TOTAL_S} s for node 0 to begin session {number}")
                return scratch
            list(node.folder.parent.iterdir())  # refreshes the view of an NFS client
            time.sleep(POLL_S)
        announced = Announcement(**found)
        scratch = Path(announced.scratch)
        if announced.launcher == _END:
            break
        with processes(node, number, announced) as child:
            while child.poll() is None and not node.over(number).exists() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            outcome = finish(node, number, child)
        write_atomically(node.ended(number, node.allocation.node_rank), json.dumps(asdict(outcome)))
    return scratch


def run_session(node: SessionNode, number: int, launcher: Launcher, scratch: Path) -> str | None:
    """Run one session on all nodes. Returns why it ended early, or None if it did not."""
    announced = Announcement(launcher, str(scratch))
    node.session(number).mkdir(mode=0o700)
    announce(node, number, announced)
    watch = SessionWatch(node, number, launcher)
    with processes(node, number, announced) as child:
        late = None
        while child.poll() is None and late is None and not watch.others_failed():
            late = watch.late()
            time.sleep(POLL_S)
        node.over(number).touch()
        own = finish(node, number, child) if late is None else SessionEnd(124, late)
    others = watch.await_others()
    return late or reason_of(node.session(number), [own, *others])


class SessionWatch:
    """Node 0's view of a session."""

    def __init__(self, node: SessionNode, number: int, launcher: Launcher) -> None:
        self._node = node
        self._number = number
        self._launcher = launcher
        self._seen: tuple[str, ...] = ()
        self._since = time.monotonic()

    def late(self) -> str | None:
        """Return in words that a check, or the start of the processes, takes too long; None if not."""
        lines = read(self._node.results)
        now = tuple(f"{line.name}:{line.state}" for line in lines)
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        running = [line for line in unfinished(lines, self._launcher) if line.state == "started"]
        limit = running[0].deadline_s if running else BETWEEN_CHECKS_S + self._node.options.start_timeout
        if time.monotonic() - self._since <= limit:
            return None
        return f"did not end within {limit:.0f} s" if running else f"the processes did not start within {limit:.0f} s"

    def others_failed(self) -> bool:
        return any(other.exit_code != 0 for other in self._others())

    def await_others(self) -> list[SessionEnd]:
        """Wait until the processes of the other nodes have ended, so that ports and devices are free."""
        count = len(self._node.allocation.nodes) - 1
        deadline = time.monotonic() + 4 * GRACE_S
        while len(found := self._others()) < count and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return found

    def _others(self) -> list[SessionEnd]:
        found = []
        for rank in range(1, len(self._node.allocation.nodes)):
            if written := read_json(self._node.ended(self._number, rank)):
                found.append(SessionEnd(**written))
        return found


@contextmanager
def processes(node: SessionNode, number: int, announced: Announcement) -> Iterator[subprocess.Popen[bytes]]:
    """Start this node's processes of a session, and end them."""
    folder = node.session(number)
    environ = {**os.environ, ENV_ATTEMPT_DIR: str(folder), ENV_SCRATCH: announced.scratch}
    with open_to_append(log_of(node, number)) as output:
        child = start([sys.executable, "-P", "-m", *entry(node, number, announced.launcher)], environ, output)
        try:
            yield child
        finally:
            end(child)
            remove_recorded(folder, node.allocation.node_rank)  # if it was killed, its files are still there


def entry(node: SessionNode, number: int, launcher: str) -> list[str]:
    """Return the module and the arguments of the node entry of a session."""
    options, allocation = node.options, node.allocation
    program = [
        *("--device", options.device, "--nodes", str(len(allocation.nodes)), "--processes", str(options.processes)),
        *("--results", str(node.results), "--folder", str(node.session(number))),
    ]
    common = common_options(options)
    if launcher == "torchrun":
        return ["hpc_rl.node.torchrun", *common, "--", "-P", "-m", "hpc_rl.probes.acceptance.on_ranks", *program]
    first = [] if options.first_port is None else ["--first-port", str(options.first_port)]
    driver = [sys.executable, "-P", "-m", "hpc_rl.probes.acceptance.on_ray", *program]
    return ["hpc_rl.node.ray_cluster.node", *common, *first, *node.ray_options, "--", *driver]


def finish(node: SessionNode, number: int, child: subprocess.Popen[bytes]) -> SessionEnd:
    """Give the processes time to end by themselves, then end them. Returns how they ended."""
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        end(child)
    code = shell_code(child.returncode)
    return SessionEnd(code, "" if code == 0 else last_words(log_of(node, number)))


def reason_of(folder: Path, ended: Sequence[SessionEnd]) -> str | None:
    """Return why a session failed, or None if it did not: what the first rank that failed wrote, or else its node."""
    failed = [one for one in ended if one.exit_code != 0]
    if not failed:
        return None
    errors = sorted(folder.glob("rank*.error"), key=lambda path: path.stat().st_mtime)
    if errors:
        return f"{errors[0].stem.replace('rank', 'rank ')}: {errors[0].read_text()}"
    # The code of a process that was terminated is a consequence.
    causes = [one for one in failed if one.exit_code not in (143, 137)] or failed
    return f"exit code {causes[0].exit_code}: {causes[0].said}"


def settle(results: Path, launcher: Launcher, reason: str | None, *, progress: bool) -> None:
    """Write the result of the check that a session broke.

    If no check could be started, none will be. That is one failure, and all checks that are left are skipped.
    """
    left = unfinished(read(results), launcher)
    running = [line for line in left if line.state == "started"]
    reason = reason or "the processes ended without a result"
    if running:
        append(results, [line.ended("failed", reason) for line in running])
    elif (left and not progress) or all(line.launcher != launcher for line in read(results)):
        failed = Line(f"start of {launcher}", launcher, "started", "no check of its could run").ended("failed", reason)
        append(results, [failed, *(line.ended("skipped", f"{launcher} did not start") for line in left)])


def has_more(lines: Sequence[Line], launcher: Launcher) -> bool:
    """Whether a launcher has checks that have not ended, or none that is planned yet."""
    return bool(unfinished(lines, launcher)) or all(line.launcher != launcher for line in lines)


def ended_names(results: Path) -> set[str]:
    """Return the names of the checks that have ended."""
    return {line.name for line in read(results) if line.has_ended}


def announce(node: SessionNode, number: int, announced: Announcement) -> None:
    write_atomically(node.announcement(number), json.dumps(asdict(announced)))


def log_of(node: SessionNode, number: int) -> Path:
    """Return the path of the output of this node's processes."""
    return node.session(number) / f"{node.allocation.node_rank}.out"
