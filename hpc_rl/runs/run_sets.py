"""Run sets: the runs of a sweep or a pipeline, which are below one folder; how to stop or cancel all of them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hpc_rl.config.pipeline import ROUND
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.formats.counted import counted
from hpc_rl.formats.typed_json import is_text
from hpc_rl.run_dir import PIPELINE_MARK, SWEEP_MARK, RunDir
from hpc_rl.runs import control
from hpc_rl.runs.folders import ROOT, is_pipeline, is_sweep
from hpc_rl.runs.status import RunStatus, statuses_of
from hpc_rl.system.files import read_json
from hpc_rl.tracking.recorded import STAGE

_STAGE = re.compile(r"[\w-]{1,60}")
"""Name of a stage, of which that of a folder is made."""


@dataclass(frozen=True)
class RunSet(ABC):
    """A folder with several runs that were submitted together."""

    path: Path
    noun: ClassVar[str]
    """What the user calls it."""
    mark: ClassVar[str]
    """Name of the file that lists the runs, what was submitted, and the values of each run."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def record(self) -> Path:
        return self.path / self.mark

    @abstractmethod
    def runs(self) -> list[RunDir]:
        """Return the runs, in order."""

    @abstractmethod
    def values(self) -> list[dict[str, str]]:
        """Return what distinguishes each run from the others, for tables and plots: name -> value."""

    def has_job(self, job_id: str) -> bool:
        """Return whether a job or an array of jobs belongs to one of the runs."""
        jobs = [str(run.read_job().get("job_id")) for run in self.runs()]
        return any(job == job_id or job.startswith(f"{job_id}_") for job in jobs)

    def _listed(self, key: str) -> list[dict[str, Any]]:
        """Return a list of tables of the record; empty if it is damaged."""
        found = read_json(self.record).get(key)
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


class SweepDir(RunSet):
    """The folder of a sweep. It contains the runs NAME_1, NAME_2, ..., named like the tasks of a Slurm array."""

    noun, mark = "sweep", SWEEP_MARK

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
        return [{str(key): str(value) for key, value in one.items()} for one in self._listed("points")]


class PipelineDir(RunSet):
    """The folder of a pipeline. It contains a run for each stage of each round, NAME_ROUND-STAGE."""

    noun, mark = "pipeline", PIPELINE_MARK

    def run(self, round_: int, stage: str) -> RunDir:
        return RunDir(self.path / f"{self.name}_{round_}-{stage}")

    def runs(self) -> list[RunDir]:
        return [self.run(int(one[ROUND]), one[STAGE]) for one in self.values()]

    def values(self) -> list[dict[str, str]]:
        """Return round and stage of each run."""
        return [
            {ROUND: str(one[ROUND]), STAGE: one[STAGE]}
            for one in self._listed("stages")
            if str(one.get(ROUND)).isdecimal() and is_text(one.get(STAGE)) and _STAGE.fullmatch(one[STAGE])
        ]


def find_run_set(target: str) -> RunSet | None:
    """Find the sweep or pipeline that a user names by its path, its name below ./runs, or the job id of its array."""
    for path in (Path(target), ROOT / target):
        if (found := run_set_in(path)) is not None:
            return found
    if not re.fullmatch(r"\d+", target) or not ROOT.is_dir():
        return None
    sweeps = (SweepDir(path.absolute()) for path in sorted(ROOT.iterdir()) if is_sweep(path))
    return next((sweep for sweep in sweeps if sweep.has_job(target)), None)


def run_set_in(folder: Path) -> RunSet | None:
    """Return the sweep or pipeline whose runs are in a folder; None if it is another folder."""
    if is_sweep(folder):
        return SweepDir(folder.absolute())
    return PipelineDir(folder.absolute()) if is_pipeline(folder) else None


def cancel(runs: RunSet) -> str:
    """End every job of a sweep or pipeline immediately. Return a line that describes what was done.

    Raises:
        UserError: the folder or one of its runs belongs to another user.
    """
    _check_own(runs)
    found = statuses_of(runs.runs())
    active = [now for now in found if now.active]
    if not active:
        return f"{runs.noun} {runs.name} has no job to cancel: {states(found)}"
    control.cancel_jobs(active)
    return f"cancelled {counted(len(active), 'job')} of {runs.noun} {runs.name} (previous states: {states(active)})"


def stop(runs: RunSet) -> str:
    """Ask running jobs to save and exit, and remove waiting ones from the queue. Return a line about what was done.

    Raises:
        UserError: the folder or one of its runs belongs to another user.
    """
    _check_own(runs)
    found = statuses_of(runs.runs())
    waiting = [now for now in found if now.state == "PENDING"]
    running = [now for now in found if now.active and now.state != "PENDING"]
    if not waiting and not running:
        return f"{runs.noun} {runs.name} has no job to stop: {states(found)}"
    if waiting:  # first, so that none of them starts when a running one exits
        control.cancel_jobs(waiting)
    for now in running:
        control.ask_to_stop(run_of(now))
    return (
        f"{counted(len(running), 'running job')} of {runs.noun} {runs.name} will save as soon as possible and exit "
        f"with code {EXIT_STOPPED}; removed from the queue: {counted(len(waiting), 'waiting job')}"
    )


def _check_own(runs: RunSet) -> None:
    for run in (RunDir(runs.path), *runs.runs()):
        control.check_own(run)


def states(found: Iterable[RunStatus]) -> str:
    """Count states, the most frequent first: `3 COMPLETED, 1 FAILED`."""
    return ", ".join(f"{count} {state}" for state, count in Counter(now.state for now in found).most_common())


def run_of(now: RunStatus) -> RunDir:
    return RunDir(Path(now.run_dir))
