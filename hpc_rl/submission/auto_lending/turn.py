"""python -m hpc_rl.submission.auto_lending.turn RUN_DIR [--last]

One look of a run after the lender jobs that it queues itself: queue more while engines are its bottleneck, and cancel
those that wait while they are not. Node 0 of the run starts this from time to time, on a node that can call sbatch.
Whatever goes wrong is a line of the run's log, and the next look tries again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.config.compose import load_config
from hpc_rl.config.rl.ppo import PpoConfig
from hpc_rl.errors import UnclearError, UserError
from hpc_rl.formats.auto_lending import AutoLending, needs_looks, order_file, read_auto_lending, write_auto_lending
from hpc_rl.formats.counted import counted
from hpc_rl.formats.offer import read_lent_nodes
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.control import cancel_waiting, check_own
from hpc_rl.runs.status import status_of
from hpc_rl.slurm import commands
from hpc_rl.submission import launch, queue
from hpc_rl.submission.auto_lending.decision import LenderJobs, change, waited_share
from hpc_rl.submission.auto_lending.jobs import count, say
from hpc_rl.submission.auto_lending.order import Order, read_order
from hpc_rl.submission.script.render import render
from hpc_rl.system.files import read_end
from hpc_rl.tracking.metrics import parse_line

MOST_FAILURES = 3
"""Lender jobs that fail one directly after the other, after which no more are queued."""
_END_BYTES = 2**18
"""Of metrics.jsonl that are read: many more than those of the newest steps."""


def take_turn(run: RunDir, is_last: bool = False) -> AutoLending:
    """Look once, and record what was found.

    Args:
        is_last: whether the run ends, so that no lender has to wait in the queue any more.
    """
    found = read_auto_lending(run.path)
    before, found.problem = found.problem, ""
    try:
        if not commands.available():
            raise UserError("there is no sbatch on PATH here: put it there (slurm.setup), or use an image with it")
        _look(run, found, is_last)
    except (UserError, OSError) as error:
        found.problem = " ".join(str(error).split())
    if found.problem and found.problem != before:
        say(found.problem)
    write_auto_lending(run.path, found)
    return found


def end_order(run: RunDir) -> str:
    """Let a run queue no more lender jobs; return what follows, as a sentence.

    Raises:
        UserError: it does not queue any.
    """
    check_own(run)
    if not needs_looks(run.path):
        raise UserError(f"run {run.name} queues no lender jobs itself: nothing to end")
    order_file(run.path).unlink(missing_ok=True)
    if status_of(run).state == "RUNNING":
        return f"run {run.name} queues no more lender jobs, and cancels those that wait; those that run stay"
    found = take_turn(run, is_last=True)
    return f"run {run.name} queues no more lender jobs" + (f" ({found.problem})" if found.problem else "")


def _look(run: RunDir, found: AutoLending, is_last: bool) -> None:
    order = read_order(run)
    if order is not None and order.number != found.order:
        found.order, found.failures = order.number, 0
    waiting = count(run, found)
    records = _newest_steps(run)
    if records and records[-1]["step"] != found.step:
        found.step, found.ran = records[-1]["step"], found.running
    if order is None or is_last or found.failures >= MOST_FAILURES:
        wanted = -found.waiting
        reason = "the run ends" if is_last else "the order has ended" if order is None else "lender jobs fail"
    else:
        share, reason = (1.0, "the run has no engine") if _has_no_engine(run) else _waited(records)
        jobs = LenderJobs(found.waiting, found.running, found.ran)
        wanted = change(share, jobs, order.most, order.config.lend.auto_at_a_time)
    if wanted < 0:
        if gone := cancel_waiting(waiting[wanted:]):
            say(f"removed {counted(len(gone), 'lender job')} from the queue: {reason}")
        count(run, found)
    elif order is not None:
        _queue(run, order, found, wanted, reason)
    if found.failures >= MOST_FAILURES and not is_last:
        raise UserError(
            f"no more lender jobs are queued, because the last {found.failures} have failed: look at their logs "
            f"(hpc-rl runs), and give the order again (hpc-rl lend {run.name} --auto N)"
        )


def _queue(run: RunDir, order: Order, found: AutoLending, wanted: int, reason: str) -> None:
    names: list[str] = []
    try:
        os.chdir(order.folder)
        for _ in range(wanted):
            if not order_file(run.path).exists():
                break
            job, script = launch.make_run_dir(planned := order.job(), render(planned))
            queue.record(job, None, queue.asked_place(script, None))
            found.lenders.append(str(job.run_dir.path))
            found.waiting += 1
            write_auto_lending(run.path, found)  # before Slurm has it: it is found again, whatever happens
            try:
                queue.submit(job, script)
            except UnclearError:
                raise
            except UserError:
                queue.remove(job.run_dir.path)
                found.lenders.pop()
                found.waiting -= 1
                raise
            names.append(job.name)
    finally:
        if names:
            say(f"queued {', '.join(names)}: {reason}")


def _waited(records: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
    share = waited_share(records)
    return share, "" if share is None else f"the run spent {share:.0%} of its last steps waiting for engines"


def _newest_steps(run: RunDir) -> list[dict[str, Any]]:
    """Return one record for each of the newest steps, in order."""
    found: dict[int, dict[str, Any]] = {}
    for line in read_end(run.metrics, _END_BYTES).decode(errors="replace").splitlines():
        if record := parse_line(line):
            later = [step for step in found if step > record["step"]]  # of an attempt that repeats them
            for step in later:
                del found[step]
            found[record["step"]] = found.get(record["step"], {}) | record
    return list(found.values())


def _has_no_engine(run: RunDir) -> bool:
    """Return whether the run depends on lent engines, and has none now. Then its step does not end."""
    config = load_config("ppo", run.latest_settings)
    attempts = run.attempts()
    assert isinstance(config, PpoConfig)
    lent = read_lent_nodes(attempts[-1]) if attempts else []
    return config.rollout.engines == "lent" and not any(node.engines for node in lent)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.submission.auto_lending.turn", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--last", action="store_true", help="the run ends: cancel the jobs that wait")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a job that sbatch has just queued must not be forgotten
    take_turn(RunDir(options.run.absolute()), options.last)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
