"""The run as the adapter inside a program sees it: when to stop, what is measured, what is saved. Used by rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from hpc_rl.adapters.saved import Checkpoint, newest_saved, record_saved
from hpc_rl.run_dir import ENV_RUN_DIR, RunDir
from hpc_rl.tracking.metrics import MetricsFile
from hpc_rl.training.stopping import SAVING, TESTING, open_stopping, stopped_line

_STEP = "timing_s/step"


def run_of_process() -> RunDir:
    """Return the run to which this process belongs."""
    return RunDir(Path(os.environ[ENV_RUN_DIR]))


@cache
def metrics_of(run: RunDir) -> MetricsFile:
    """Return this process's only writer of the run's measurements: a second one would remove those of the first."""
    return MetricsFile(run.metrics)


class AdaptedRun:
    """Records the steps of a program, and decides when it saves and ends."""

    def __init__(self) -> None:
        self._run = run_of_process()
        self._stopping = open_stopping(self._run, 0, ())  # the job script writes the stop file slurm.warning_s before
        self._metrics = metrics_of(self._run)
        self._step = (0, 0)
        self._is_resumed = False
        self._began = time.monotonic()

    def newest(self, output: str | None, part: str) -> Checkpoint | None:
        """Return the last checkpoint of this run in a folder, and of a training. See newest_saved."""
        folder = Path(output) if output is not None else None
        found = newest_saved(self._run, folder, part)
        if found is None and (gone := newest_saved(self._run, folder, part, exists=lambda _: True)) is not None:
            print(
                f"hpc-rl: the last checkpoint of this run, {gone.path}, is not on this node, so the training does not "
                "resume from it. If you have not removed it, choose an output folder that all nodes share",
                flush=True,
            )
        self._is_resumed = found is not None
        return found

    def begin(self) -> None:
        """Note that the work of a step begins now."""
        self._began = time.monotonic()

    def end_step(self, step: int, total: int) -> None:
        """Note that a step is complete: its time is written, and decides how much may be begun before the walltime."""
        seconds = time.monotonic() - self._began
        self.begin()
        self._step = (step, total)
        self._stopping.note_step({"timing_s/train": seconds})
        self.log({_STEP: seconds, "perf/eta_s": seconds * (total - step)})

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write measurements of the current step; nothing between a resume and its first one: a line of step 0 would
        replace all others."""
        if self._step[0] or not self._is_resumed:
            self._metrics.write(*self._step, metrics)

    def is_due(self, tests: bool, boundary: int = 1) -> bool:
        """Return whether to save and end now.

        Args:
            tests: whether the program evaluates before its next step.
            boundary: number of steps after which there is a good point to resume from.
        """
        step_s, testing_s = self._stopping.rest_s(), self._stopping.testing_s if tests else 0.0
        until = boundary - self._step[0] % boundary  # the next good point, after this step
        is_due = self._stopping.due(step_s * (until if until == boundary else 1) + testing_s)
        return is_due and not (until < boundary and self._stopping.has_time(step_s * until + testing_s))

    def has_time(self, tests: bool) -> bool:
        """Return whether one more step, with an evaluation if it `tests`, can be made before the walltime ends."""
        return self._stopping.has_time(self._stopping.rest_s() + (self._stopping.testing_s if tests else 0.0))

    def note_saved(self, checkpoint: Checkpoint, seconds: float) -> None:
        """Record a checkpoint that is complete, and for how long training waited for it."""
        record_saved(self._run, checkpoint)
        self._stopping.note_save({SAVING: seconds})
        self.log({SAVING: seconds})

    def note_tested(self, seconds: float) -> None:
        """Note the time of an evaluation."""
        self._stopping.note_test(seconds)
        self.log({TESTING: seconds})

    def stopped(self) -> str:
        """Return the last line of a run that has saved and ends early."""
        return stopped_line(*self._step)
