"""The lender jobs that a run has queued itself: how many wait and run, and how the others have ended."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.formats.auto_lending import AutoLending
from hpc_rl.formats.offer import read_lent_nodes
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.control import cancel_jobs
from hpc_rl.runs.status import CANCELLED, NOT_SUBMITTED, STOPPED, RunStatus, current_job, statuses_of
from hpc_rl.slurm import commands
from hpc_rl.slurm.place import recorded
from hpc_rl.submission import queue

UNCLEAR_S = 300.0
"""How long after its submission a job whose id is not known may still appear in the queue. sbatch has a shorter
deadline (`executor.SUBMIT_TIMEOUT_S`)."""
MOST_ATTEMPTS = 3
"""Of a lender job that generates nothing, such as one with too short a walltime. A further one is cancelled."""
_NO_FAILURES = (NOT_SUBMITTED, CANCELLED, "PREEMPTED", STOPPED)
"""Ends that neither count as failures nor show that lenders work."""


def count(run: RunDir, found: AutoLending) -> list[RunStatus]:
    """Count the lender jobs that have not ended, and the failures; return those that wait, the oldest first.

    A job that may be in the queue although sbatch has not stated its id counts as waiting, but is not returned. A job
    that is queued again and again without having generated is cancelled, and counts as a failure.

    Raises:
        UserError: Slurm does not answer, and nothing has been counted; or a job cannot be cancelled, and still counts.
    """
    lenders = [RunDir(Path(path)) for path in found.lenders]
    try:
        unclear = [lender.path for lender in lenders if current_job(lender) is None and _is_unclear(lender)]
    except commands.NoAnswer as error:
        raise UserError(f"Slurm does not answer about lender jobs: {error}") from error
    statuses = statuses_of(lenders, commands.TIMEOUT_S)
    if silent := next((now for now in statuses if now.is_last_recorded), None):
        raise UserError(f"Slurm does not answer about lender jobs: {silent.reason}")
    waiting, left, useless = [], [], []
    for lender, now in zip(lenders, statuses, strict=True):
        if lender.path not in unclear and (now.state == NOT_SUBMITTED or (now.ended and not now.may_return)):
            _note_end(run, found, lender, now)
            continue
        left.append(now.run_dir)
        if len(lender.attempts()) > MOST_ATTEMPTS and not _has_generated(run, now.job_id):
            useless.append(now)
        elif now.state == "PENDING":
            waiting.append(now)
    found.lenders, found.waiting = left, len(waiting) + len(unclear)
    found.running = len(left) - found.waiting
    for now in useless:
        cancel_jobs([now])
        found.lenders.remove(now.run_dir)
        found.running, found.failures = found.running - 1, found.failures + 1
        say(f"cancelled {now.run}, which has started {MOST_ATTEMPTS} times and generated nothing: see its log")
    return waiting


def _is_unclear(lender: RunDir) -> bool:
    """Return whether Slurm may have a job whose id is not recorded. If it has it, the id is recorded.

    Raises:
        NoAnswer: Slurm does not answer.
    """
    job = lender.read_job()
    if not lender.script.exists():
        return False  # sbatch was not called
    if "place" not in job:
        return True  # in one of several clusters: the job itself records its id when it starts
    job_id = commands.job_of_log(lender.path, recorded(job, os.environ))
    if job_id is not None:
        queue.write_job(lender, {**job, "job_id": job_id})
        return False
    return time.time() - lender.script.stat().st_mtime < UNCLEAR_S


def _note_end(run: RunDir, found: AutoLending, lender: RunDir, now: RunStatus) -> None:
    if now.state == "COMPLETED" or _has_generated(run, now.job_id):
        found.failures = 0
    elif now.state not in _NO_FAILURES:
        found.failures += 1
    if now.state in (NOT_SUBMITTED, CANCELLED) and not lender.attempts():
        with contextlib.suppress(OSError):  # it has done nothing
            queue.remove(lender.path)


def _has_generated(run: RunDir, job_id: str | None) -> bool:
    """Return whether engines of a lender have generated tokens for a run. Then it is of use, however it has ended."""
    nodes = (node for attempt in reversed(run.attempts()) for node in read_lent_nodes(attempt))
    return any(node.job == job_id and node.tokens for node in nodes)


def say(text: str) -> None:
    """Write a line into the run's log."""
    print(f"hpc-rl: lend --auto: {text}", flush=True)
