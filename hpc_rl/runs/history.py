"""A run's history, completed by what Slurm's accounting knows where there is any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import is_local, status_of
from hpc_rl.slurm import commands
from hpc_rl.slurm.accounting import Start
from hpc_rl.tracking.attempts import KILLED, Attempt, History, read_history


def history(run: RunDir) -> History:
    """Attempts, requeues and node hours by the run directory: no question to Slurm, for tables of many runs."""
    return read_history(run)


def full_history(run: RunDir) -> History:
    """The same, where attempts that could not say how they ended have Slurm's word for it: one call of sacct."""
    found = read_history(run)
    jobs = {attempt.job_id for attempt in found.attempts if _is_open(attempt) and not is_local(attempt.job_id)}
    if jobs - {""}:
        found = with_accounts(found, commands.job_starts(sorted(jobs - {""})))
    if found.attempts and found.attempts[-1].state == "RUNNING":
        now = status_of(run)
        last = replace(found.attempts[-1], state=now.state, exit_code=now.exit_code)
        found = History((*found.attempts[:-1], last))
    return found


def with_accounts(found: History, starts: Sequence[Start]) -> History:
    """Pure: an attempt is the start of its job that was the last one to begin before it did.

    Slurm counts the whole allocation, but not the seconds in which a job that is queued again still ends.
    """
    return History(tuple(_accounted(attempt, starts) if _is_open(attempt) else attempt for attempt in found.attempts))


def _is_open(attempt: Attempt) -> bool:
    return attempt.state in (KILLED, "RUNNING")


def _accounted(attempt: Attempt, starts: Sequence[Start]) -> Attempt:
    # A second for the clocks of nodes and controller.
    mine = [s for s in starts if s.job_id == attempt.job_id and s.began <= (attempt.began or s.began) + 1]
    if not mine or mine[-1].ended is None:
        return attempt
    start = mine[-1]
    return replace(
        attempt,
        state=start.state,
        exit_code=start.exit_code,
        began=attempt.began or start.began,
        ended=max(start.ended or 0.0, attempt.ended or 0.0),
        nodes=start.nodes,
        node_hours=max(start.nodes * start.seconds / 3600, attempt.node_hours),
    )
