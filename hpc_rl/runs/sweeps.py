"""Sweeps: the files in their folders, and how to stop or cancel all of their runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.host.files import read_json
from hpc_rl.run_dir import RunDir
from hpc_rl.runs import control
from hpc_rl.runs.status import ROOT, SWEEP_MARK, RunStatus, is_sweep, statuses_of


@dataclass(frozen=True)
class SweepDir:
    """The folder of a sweep. It contains the runs NAME_1, NAME_2, ..., named like the tasks of a Slurm array."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def record(self) -> Path:
        """sweep.json: what was submitted, and each run's values."""
        return self.path / SWEEP_MARK

    @property
    def script(self) -> Path:
        """The array's script as it was submitted."""
        return self.path / "sweep.sbatch"

    def run(self, number: int) -> RunDir:
        return RunDir(self.path / f"{self.name}_{number}")

    def runs(self) -> list[RunDir]:
        return [self.run(number) for number in range(1, len(self.values()) + 1)]

    def values(self) -> list[dict[str, str]]:
        """Return the swept values of each run: dotted key -> value."""
        found: list[dict[str, str]] = self._recorded().get("points", [])
        return found

    def has_job(self, array_id: str) -> bool:
        """Return whether this is the sweep's first array, or an array of runs that were queued again."""
        jobs = [read_json(run.job).get("job_id") for run in self.runs()]
        return any(str(job).startswith(f"{array_id}_") for job in jobs)

    def _recorded(self) -> dict[str, Any]:
        return read_json(self.record)


def find_sweep(target: str) -> SweepDir | None:
    """Find the sweep that a user names by its path, its name below ./runs, or the job id of its array."""
    for path in (Path(target), ROOT / target):
        if is_sweep(path):
            return SweepDir(path.absolute())
    if not re.fullmatch(r"\d+", target) or not ROOT.is_dir():
        return None
    sweeps = (SweepDir(path.absolute()) for path in sorted(ROOT.iterdir()) if is_sweep(path))
    return next((sweep for sweep in sweeps if sweep.has_job(target)), None)


def cancel(sweep: SweepDir) -> str:
    """End every job of the sweep immediately. Return a line that describes what was done.

    Raises:
        UserError: the sweep or one of its runs belongs to another user.
    """
    _check_own(sweep)
    found = statuses_of(sweep.runs())
    active = [now for now in found if now.active]
    if not active:
        return f"sweep {sweep.name} has no job to cancel: {states(found)}"
    control.cancel_jobs(active)
    return f"cancelled {_jobs(active)} of sweep {sweep.name} (previous states: {states(active)})"


def stop(sweep: SweepDir) -> str:
    """Ask running jobs to save and exit, and remove waiting ones from the queue. Return a line about what was done.

    Raises:
        UserError: the sweep or one of its runs belongs to another user.
    """
    _check_own(sweep)
    found = statuses_of(sweep.runs())
    waiting = [now for now in found if now.state == "PENDING"]
    running = [now for now in found if now.active and now.state != "PENDING"]
    if not waiting and not running:
        return f"sweep {sweep.name} has no job to stop: {states(found)}"
    if waiting:  # first, so that none of them starts when a running one exits
        control.cancel_jobs(waiting)
    for now in running:
        control.ask_to_stop(run_of(now))
    return (
        f"{len(running)} running jobs of sweep {sweep.name} will save as soon as they can and exit with code "
        f"{EXIT_STOPPED}; {len(waiting)} waiting jobs were removed from the queue"
    )


def _check_own(sweep: SweepDir) -> None:
    for run in (RunDir(sweep.path), *sweep.runs()):
        control.check_own(run)


def states(found: Iterable[RunStatus]) -> str:
    """Count states, the most frequent first: `3 COMPLETED, 1 FAILED`."""
    return ", ".join(f"{count} {state}" for state, count in Counter(now.state for now in found).most_common())


def run_of(now: RunStatus) -> RunDir:
    return RunDir(Path(now.run_dir))


def _jobs(found: list[RunStatus]) -> str:
    return "1 job" if len(found) == 1 else f"{len(found)} jobs"
