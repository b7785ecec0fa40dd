"""When a run stops before its end: somebody asked for it, or the rest of the walltime is too short.

Trainers ask between the parts of a step, with an estimate of the work that has to be done before the next question. It
comes from the longest of the latest steps: a step is not begun if the checkpoint after it would be late. A stop
discards the step in progress; the run continues with the same step when it is started again.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hpc_rl.liveness.walltime import EARLY_S, RESERVE_S, WalltimeEnd, job_end
from hpc_rl.run_dir import WALLTIME, RunDir, current_attempt_dir, moved_end_file

MARGIN = 1.25
"""Factor by which a step or a checkpoint may take longer than the longest of the latest ones."""
WINDOW = 10
"""Number of latest steps whose times count."""
FEW = 3
"""Number of latest checkpoints and validations whose times count."""
SETTLE_S = 5.0
"""How long the end of the walltime has to look near before the run stops."""

IN_VAIN = (
    "the walltime ends before the first step of this attempt is done, and another attempt would not change that: raise "
    "--time, or make a step shorter (a smaller data.train_batch_size, or more nodes)"
)
"""Error of a run if `Stopping.is_in_vain` returns True: it would be queued again forever."""

_PHASE = "timing_s/"
SAVING, WRITING, TESTING = "timing_s/save_checkpoint", "timing_s/write_checkpoint", "timing_s/testing"
WAITING = "timing_s/window"
"""Time until the next window of streamed data was there. It says nothing about the next step, and a stop ends it."""
_WHOLE = "timing_s/step"


class Stopped(Exception):
    """The run stops before its first step. The message is the last line of the log."""


class Stopping:
    """Decides when a run stops early, in the process that writes its files.

    Args:
        run: its stop file is read, and written if the walltime ends too soon.
        warning_s: shortest time before the end of the walltime at which to save (slurm.warning_s).
        now: returns the Unix time.
    """

    def __init__(self, run: RunDir, warning_s: int, job_end: WalltimeEnd, now: Callable[[], float] = time.time) -> None:
        self._run = run
        self._warning_s = warning_s
        self._job_end = job_end
        self._now = now
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._saves: deque[float] = deque(maxlen=FEW)
        self._writes: deque[float] = deque(maxlen=FEW)
        self._tests: deque[float] = deque(maxlen=FEW)
        self.made_a_step = False
        """Whether this attempt has made a step, or stored other results that the next attempt starts from. The first
        step is always tried: otherwise a run whose steps are longer than its walltime would be queued again forever."""

    def remember(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take over the times of earlier attempts, from the records of metrics.jsonl."""
        for record in records:
            seconds = {name: value for name, value in record.items() if isinstance(value, float)}
            self._add(seconds)
            self.note_save(seconds)
            self.note_test(seconds.get(TESTING))

    def note_step(self, seconds: Mapping[str, float]) -> None:
        """Note the times of the phases of a completed step, as `Clock` measured them."""
        self._add(seconds)
        self.made_a_step = True

    def note_save(self, seconds: Mapping[str, float]) -> None:
        """Note for how long training waited for a checkpoint, and how long one was written in the background, if so."""
        for name, found in ((SAVING, self._saves), (WRITING, self._writes)):
            if name in seconds:
                found.append(seconds[name])

    def note_test(self, seconds: float | None) -> None:
        """Note the time of a validation; None if there was none."""
        if seconds is not None:
            self._tests.append(seconds)

    def rest_s(self, done: Collection[str] = ()) -> float:
        """Return the longest time of the latest steps, in seconds, for all phases but those that are done."""
        names = {name for seconds in self._steps for name in seconds}.difference(done)
        return sum(max(seconds.get(name, 0.0) for seconds in self._steps) for name in names)

    @property
    def testing_s(self) -> float:
        """The longest time of the latest validations, in seconds."""
        return max(self._tests, default=0.0)

    def due(self, work_s: float) -> bool:
        """Return whether to stop now. If it is because of the walltime, this writes the stop file.

        Args:
            work_s: seconds of work, as estimated, before the run can save.
        """
        if self._run.stop.exists():
            return True
        if not self.made_a_step:
            return False
        needed_s = self._needed_s(work_s)
        left_s = self._settled_left_s(needed_s)
        if left_s >= needed_s:
            return False
        with contextlib.suppress(FileExistsError), self._run.stop.open("x") as stop:  # a user's request stays
            stop.write(f"{WALLTIME}\n")
        print(
            f"stopping: the walltime ends in {left_s:.0f} s; continuing and then saving may take {needed_s:.0f} s",
            flush=True,
        )
        return True

    def has_time(self, work_s: float) -> bool:
        """Return whether the walltime suffices for this work, as estimated, and for saving after it."""
        return self._left_s() >= self._needed_s(work_s)

    def is_in_vain(self) -> bool:
        """Return whether the walltime ends before the first step of this attempt is done."""
        if self.made_a_step or not self._run.stop.exists():
            return False
        is_near = self._left_s() <= self._warning_s + EARLY_S
        return is_near and self._run.stop.read_text().strip() == WALLTIME

    def _left_s(self) -> float:
        end = self._job_end()
        return math.inf if end is None else end - self._now()

    def _settled_left_s(self, needed_s: float) -> float:
        """Return the time that is left. Less than is needed is believed when it has been so for SETTLE_S: after a
        suspension, the job script has to learn the new end first."""
        deadline = time.monotonic() + SETTLE_S
        while (left_s := self._left_s()) < needed_s and time.monotonic() < deadline:
            time.sleep(0.2)
        return left_s

    def _needed_s(self, work_s: float) -> float:
        # A stop may have to wait for a checkpoint that is being written, before it writes another one.
        saving_s = max(self._saves, default=0.0) + 2 * max(self._writes, default=0.0)
        return MARGIN * work_s + max(float(self._warning_s), MARGIN * saving_s + RESERVE_S)

    def _add(self, seconds: Mapping[str, float]) -> None:
        others = (_WHOLE, SAVING, WRITING, TESTING, WAITING)
        phases = {name: value for name, value in seconds.items() if name.startswith(_PHASE) and name not in others}
        if phases:
            self._steps.append(phases)


def open_stopping(run: RunDir, warning_s: int, records: Sequence[Mapping[str, Any]]) -> Stopping:
    """Return the decision for this process's job, with the times of earlier attempts.

    Args:
        records: what metrics.jsonl contains so far.
    """
    end = job_end(os.environ, moved_end_file(current_attempt_dir() or run.path))
    stopping = Stopping(run, warning_s, end)
    stopping.remember(records)
    return stopping


def stopped_line(step: int, total_steps: int) -> str:
    """Return the last line of a run that stops after this step."""
    saved = "checkpoint saved" if step else "nothing is saved yet"
    return f"stopped after step {step} of {total_steps}: {saved}"
