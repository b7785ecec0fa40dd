"""Ending a sweep, and starting again what is left of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from hpc_rl.errors import EXIT_STOPPED, UserError
from hpc_rl.launch import jobs, runs
from hpc_rl.launch.after import find_after_again
from hpc_rl.launch.runs import RunStatus
from hpc_rl.launch.sweep_dir import SweepDir
from hpc_rl.run_dir import RunDir
from hpc_rl.slurm import commands


def cancel(sweep: SweepDir) -> str:
    """End every job of the sweep now; what was done, in a line."""
    found = runs.statuses(sweep.runs())
    active = [now for now in found if now.active]
    if not active:
        return f"sweep {sweep.name} has no job to cancel: {states(found)}"
    _cancel(active)
    return f"cancelled {_jobs(active)} of sweep {sweep.name}: {states(active)} before"


def stop(sweep: SweepDir) -> str:
    """Ask every run to save and leave, and take out of the queue what waits; what was done, in a line."""
    found = runs.statuses(sweep.runs())
    waiting = [now for now in found if now.state == "PENDING"]
    running = [now for now in found if now.active and now.state != "PENDING"]
    if not waiting and not running:
        return f"sweep {sweep.name} has nothing to stop: {states(found)}"
    if waiting:  # first, so that none of them starts in the place of one that leaves
        _cancel(waiting)
    for now in running:
        jobs.ask_to_stop(_run(now))
    return (
        f"{len(running)} running jobs of sweep {sweep.name} will save at their next step and leave with exit code "
        f"{EXIT_STOPPED}; took {len(waiting)} waiting ones out of the queue"
    )


def requeue(sweep: SweepDir) -> str:
    """Queue again, as one array, the runs that ended before they were done; what was done, in a line."""
    found = runs.statuses(sweep.runs())
    again = {number: now for number, now in enumerate(found, 1) if not now.active and now.state != "COMPLETED"}
    if not again:
        return f"sweep {sweep.name} has nothing to queue again: {states(found)}"
    if not sweep.script.is_file():
        raise UserError(f"sweep {sweep.name} has no {sweep.script.name}: queue its runs one by one")
    script = sweep.script.read_text()
    limit = re.search(r"^#SBATCH --array=\S*?(%\d+)$", script, re.MULTILINE)
    after = find_after_again(sweep.runs())
    for now in again.values():
        _run(now).stop.unlink(missing_ok=True)
    array = f"--array={','.join(map(str, again))}{limit[1] if limit else ''}"
    job_id = jobs.queue(script, [array, *(after.sbatch_options if after else [])])
    for number, now in again.items():
        jobs.record_again(_run(now), f"{job_id}_{number}")
    before = states(again.values())
    return f"submitted job {job_id}: {len(again)} of {len(found)} runs of sweep {sweep.name} again ({before} before)"


def states(found: Iterable[RunStatus]) -> str:
    """`3 COMPLETED, 1 FAILED`, the most frequent first."""
    return ", ".join(f"{count} {state}" for state, count in Counter(now.state for now in found).most_common())


def _cancel(active: list[RunStatus]) -> None:
    commands.cancel(*(str(now.job_id) for now in active))
    for now in active:
        jobs.note_cancelled(now)


def _run(now: RunStatus) -> RunDir:
    return RunDir(Path(now.run_dir))


def _jobs(found: list[RunStatus]) -> str:
    return "1 job" if len(found) == 1 else f"{len(found)} jobs"
