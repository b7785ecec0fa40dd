"""One node of the health check: collects facts, tests what training needs, and writes a report.

    srun --ntasks-per-node=1 python -m hpc_rl.node.health.check --processes 8 [-- train]

The job script starts this once on each node. The login node evaluates the reports.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.formats.node_report import report_path
from hpc_rl.node.entry import add_common_options, print_error, run_entry, this_allocation, this_attempt_dir
from hpc_rl.node.health.facts import node_facts
from hpc_rl.node.health.train import run_training_checks
from hpc_rl.node.health.trials import FOLDERS, try_all_reduce, try_ray
from hpc_rl.node.rendezvous import POLL_S, Rendezvous, named
from hpc_rl.system.locks import is_locked, locked

ANSWER_TIMEOUT_S = 60
TRAIN = "train"
"""The word after `--` that asks for the training checks."""


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    split = list(words).index("--") if "--" in words else len(words)
    options, ray_options = _parse(words[:split])
    trains = TRAIN in words[split:]
    # Exit normally, so that child processes are ended.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    return run_entry(lambda: run_node(options, ray_options, trains))


def run_node(options: argparse.Namespace, ray_options: Sequence[str], trains: bool = False) -> int:
    """Collect facts, run the tests and write the report. Returns the exit code.

    Args:
        trains: whether to run the training checks too.

    Raises:
        UserError: the nodes do not see each other's files, so there is no shared folder for a report.
    """
    allocation, attempt_dir = this_allocation(), this_attempt_dir()
    rendezvous = Rendezvous(attempt_dir, allocation.nodes, allocation.node_rank)
    rendezvous.check_shared()
    if allocation.is_head:
        for folder in FOLDERS:
            (attempt_dir / folder).mkdir(mode=0o700)
    rendezvous.arrive()
    missing = _await_all(rendezvous, options.start_timeout) if allocation.is_head else []
    if missing:
        print_error(f"{named(missing)} did not start within {options.start_timeout} s")
    round_trip_s, sees_locks = (None, None) if missing else _exchange_files(rendezvous, options.start_timeout)
    report = replace(
        node_facts(allocation, attempt_dir, options), missing=missing, round_trip_s=round_trip_s, sees_locks=sees_locks
    )
    # Written before the tests too, in case one of them ends this process.
    report.write(report_path(attempt_dir, allocation.node_rank))
    if not missing:
        report = replace(report, all_reduce=try_all_reduce(attempt_dir, options))
        report = replace(report, ray=try_ray(allocation, attempt_dir, options, ray_options))
        report.write(report_path(attempt_dir, allocation.node_rank))
        if trains:
            run_training_checks(allocation, attempt_dir, options, ray_options)
    return 0


def _await_all(rendezvous: Rendezvous, timeout_s: float) -> list[str]:
    """Wait for all nodes and return the names of those that did not start in time."""
    deadline = time.monotonic() + timeout_s
    while (missing := rendezvous.missing()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return missing


def _exchange_files(rendezvous: Rendezvous, start_timeout_s: float) -> tuple[float | None, bool | None]:
    """Have every other node answer a file of the first one with a file, while the first one holds a file lock.

    Returns:
        on the first node, the seconds until all have answered; on the others, whether they see the lock.

    Raises:
        UserError: a file does not arrive in time.
    """
    others = [f".answer{rank}" for rank in range(1, len(rendezvous.nodes))]
    began = time.monotonic()
    if rendezvous.node_rank > 0:
        _await_files(rendezvous, [".question"], start_timeout_s + ANSWER_TIMEOUT_S)  # the first may wait for others
        sees_lock = _sees_lock(rendezvous.attempt_dir / ".question")
        (rendezvous.attempt_dir / f".answer{rendezvous.node_rank}").touch()
        return None, sees_lock
    new = rendezvous.attempt_dir / ".question.new"
    with locked(new):
        new.rename(rendezvous.attempt_dir / ".question")  # the others see it when it is locked, not before
        _await_files(rendezvous, others, ANSWER_TIMEOUT_S)
    return time.monotonic() - began if others else None, None


def _sees_lock(path: Path) -> bool:
    try:
        return is_locked(path)
    except OSError:  # a file system without locks
        return False


def _await_files(rendezvous: Rendezvous, names: Sequence[str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while absent := set(names) - {path.name for path in rendezvous.attempt_dir.iterdir()}:
        if time.monotonic() > deadline:
            raise UserError(
                f"node {rendezvous.nodes[rendezvous.node_rank]} waited {timeout_s} s for {', '.join(sorted(absent))} "
                f"in {rendezvous.attempt_dir}: files of other nodes arrive late or never on this file system"
            )
        time.sleep(0.005)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this entry, and further ones for `hpc_rl.node.ray_cluster.node`."""
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.node.health.check", description=__doc__)
    add_common_options(parser)
    parser.add_argument("--first-port", type=int, help="first port that Ray uses (default: derived from the job id)")
    parser.add_argument("--start-timeout", type=int, default=90, help="seconds within which all nodes must start")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    sys.exit(main())
