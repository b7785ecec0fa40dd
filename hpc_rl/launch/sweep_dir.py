"""What lies where in the folder of a sweep, and which sweep is meant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_rl.launch import runs
from hpc_rl.run_dir import RunDir


@dataclass(frozen=True)
class SweepDir:
    """The folder of a sweep. Its runs are in it, called NAME_1, NAME_2, ...: as Slurm calls the tasks of an array."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def record(self) -> Path:
        """sweep.json: what was submitted, and each run's values."""
        return self.path / runs.SWEEP_MARK

    @property
    def script(self) -> Path:
        """The array's script as it was submitted."""
        return self.path / "sweep.sbatch"

    def run(self, number: int) -> RunDir:
        return RunDir(self.path / f"{self.name}_{number}")

    def runs(self) -> list[RunDir]:
        return [self.run(number) for number in range(1, len(self.values()) + 1)]

    def values(self) -> list[dict[str, str]]:
        """What was swept: dotted key -> value, for each run."""
        found: list[dict[str, str]] = self._recorded().get("points", [])
        return found

    def has_job(self, array_id: str) -> bool:
        """Whether this is the sweep's first array, or one of points that were queued again."""
        jobs = [runs.read_json(run.job).get("job_id") for run in self.runs()]
        return any(str(job).startswith(f"{array_id}_") for job in jobs)

    def _recorded(self) -> dict[str, Any]:
        return runs.read_json(self.record)


def find_sweep(target: str) -> SweepDir | None:
    """The sweep that a user names: by its path, by its name below ./runs, or by its array's job id."""
    for path in (Path(target), runs.ROOT / target):
        if runs.is_sweep(path):
            return SweepDir(path.absolute())
    if not re.fullmatch(r"\d+", target) or not runs.ROOT.is_dir():
        return None
    sweeps = (SweepDir(path.absolute()) for path in sorted(runs.ROOT.iterdir()) if runs.is_sweep(path))
    return next((sweep for sweep in sweeps if sweep.has_job(target)), None)
