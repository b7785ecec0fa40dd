"""Reports of existing runs and sweeps, with their state and accounting from Slurm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_rl.errors import UserError
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.finding import find_run
from hpc_rl.runs.run_sets import find_run_set
from hpc_rl.runs.status import RunStatus, is_local, place_of, statuses_of
from hpc_rl.slurm import commands
from hpc_rl.slurm.place import by_place
from hpc_rl.system.ownership import is_own_folder
from hpc_rl.tracking.history import History, read_history, with_accounting
from hpc_rl.tracking.page.report import write_page
from hpc_rl.tracking.recorded import read_run

REFRESH_S = 30.0
"""Interval between two versions of the page of an active run, and between two reloads of the page."""


@dataclass(frozen=True)
class ReportedRun:
    """A run of a report."""

    run: RunDir
    swept: dict[str, str]
    """The values that its sweep set: dotted key -> value; empty outside a sweep."""


def select(targets: Sequence[str]) -> list[ReportedRun]:
    """Find the runs that a user names, individually or as part of a sweep or pipeline.

    Raises:
        UserError: a run, sweep or pipeline does not exist.
    """
    found: list[ReportedRun] = []
    for target in targets:
        several = find_run_set(target)
        if several is None:
            found.append(ReportedRun(find_run(target), {}))
        else:
            found += [ReportedRun(run, point) for run, point in zip(several.runs(), several.values(), strict=True)]
    if not found:
        raise UserError(f"{targets[0]} has no runs: its list of runs is empty or damaged")
    return found


def default_path(targets: Sequence[str], selected: Sequence[ReportedRun]) -> Path:
    """Return the default path of the page: in the directory of the run or sweep; here for several targets, and for what
    another user owns."""
    run = selected[0].run
    page = run.path.parent / run.report.name if selected[0].swept else run.report
    return page if len(targets) == 1 and is_own_folder(page.parent.resolve()) else Path(run.report.name)


def write_report(selected: Sequence[ReportedRun], path: Path, refresh: bool = False) -> bool:
    """Write one page about these runs, without the runs of a sweep that have not started.

    Args:
        refresh: let the page reload itself while a run is active.

    Returns:
        whether a run is active.

    Raises:
        UserError: there is nothing to report, or the page cannot be written.
    """
    statuses = statuses_of([one.run for one in selected])
    histories = accounted_histories([one.run for one in selected], statuses)
    active = any(status.active for status in statuses)
    recorded = [
        replace(read_run(one.run), history=history, swept=one.swept, status=status.state if status.job_id else "")
        for one, history, status in zip(selected, histories, statuses, strict=True)
    ]
    shown = [run for run in recorded if run.has_started or not run.swept]
    if not shown:
        raise UserError("no run of the sweep has started: `hpc-rl runs SWEEP` lists their states")
    for run, status in zip(recorded, statuses, strict=True):
        if status.left_no_log and not (run.has_started or run.swept):
            raise UserError(
                f"run {run.name} has nothing to report: its job has failed and left no log; hpc-rl explain {run.name} "
                "shows why"
            )
    write_page(shown, path, refresh_s=REFRESH_S if refresh and active else None)
    return active


def damaged(selected: Sequence[ReportedRun]) -> list[str]:
    """Return a line for each file of the runs that could not be read."""
    return [line for one in selected for line in one.run.damaged()]


def follow_report(selected: Sequence[ReportedRun], path: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """Write the page again every REFRESH_S until all runs have ended, or until Ctrl-C."""
    try:
        while write_report(selected, path, refresh=True):
            pause(REFRESH_S)
    except KeyboardInterrupt:
        write_report(selected, path)


def accounted_histories(runs: Sequence[RunDir], statuses: Sequence[RunStatus]) -> list[History]:
    """Read the histories of runs. Slurm's accounting, one query for a cluster, completes attempts that were killed."""
    found = [read_history(run) for run in runs]
    jobs = dict.fromkeys(
        (attempt.job_id, place_of(run))
        for run, history in zip(runs, found, strict=True)
        for attempt in history.attempts
        if attempt.is_open and attempt.job_id and not is_local(attempt.job_id)
    )
    starts = {place: commands.job_starts(job_ids, place) for place, job_ids in by_place(jobs).items()}
    return [
        _current(with_accounting(history, starts.get(place_of(run), [])), now)
        for run, history, now in zip(runs, found, statuses, strict=True)
    ]


def _current(found: History, now: RunStatus) -> History:
    """Return the history with the current state of an attempt that is running, or with the end of the last job."""
    last = found.attempts[-1] if found.attempts else None
    if last is None or not (last.state == "RUNNING" or (last.is_open and now.ended and last.job_id == now.job_id)):
        return found
    return History((*found.attempts[:-1], replace(last, state=now.state, exit_code=now.exit_code)))
