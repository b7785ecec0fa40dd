"""A user's program under its adapter: its command in this attempt, its progress, and its early end."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter, ProgramPlace, ReportedStep
from hpc_rl.adapters.inside import on_path
from hpc_rl.adapters.inside.hooks import job_variables
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.adapters.table import ADAPTERS, GENERIC
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.liveness.walltime import RESERVE_S, WalltimeEnd, job_end
from hpc_rl.node.rendezvous import Rendezvous
from hpc_rl.run_dir import WALLTIME, RunDir, moved_end_file
from hpc_rl.system.files import Follower
from hpc_rl.tracking.metrics import MetricsFile, read_metrics
from hpc_rl.training.stopping import Stopping

GRACE_S = 30.0
"""For a program with hooks to end by itself, once it has saved because it was asked to."""
LOOK_S = 1.0
"""Interval between looks at the log, the stop file and the checkpoints, which are on a shared file system."""
_WORK = "timing_s/work"
"""Time until the program can save."""


class AdaptedProgram:
    """The program of a job on this node.

    Args:
        program: as it was submitted.
        log: what node 0's process writes.
        warning_s: shortest time before the end of the walltime at which to save (slurm.warning_s).
    """

    def __init__(
        self,
        adapter: Adapter,
        program: Program,
        place: ProgramPlace,
        job_end: WalltimeEnd,
        log: Path,
        warning_s: int = 0,
    ) -> None:
        self._adapter, self._program, self._place, self._job_end = adapter, program, place, job_end
        self._log = Follower(log)
        self._metrics = MetricsFile(self._place.run.metrics)
        self._stopping = Stopping(place.run, warning_s, job_end)
        self._first = self._at_stop = self._adapter.newest(self._program, self._place)
        """The last checkpoint at the start, and when the program was asked to stop."""
        self._ends_at: float | None = None
        self._progress: ReportedStep | None = None
        self._total: int | None = None
        self._last_step_at = self._last_saved_at = time.monotonic()
        self._next_look = 0.0
        self.has_saved = False
        """Whether the program has saved since it was asked to stop, and is to be ended."""

    @property
    def words(self) -> list[str]:
        """The command of this attempt."""
        return [*self._program.words, *self._adapter.arguments(self._program, self._place)]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with the variables of the adapter. Those that the user has exported take precedence."""
        found = {**self._adapter.environment(self._program, self._place), **environ}
        if self._adapter.is_hooked:
            folders = [str(Path(on_path.__path__[0])), *filter(None, [environ.get("PYTHONPATH")])]
            found |= {"PYTHONPATH": os.pathsep.join(folders), **job_variables(environ)}
        return found

    def must_end(self) -> bool:
        """Look at the program, and return whether it has saved and is to be ended. Called often, on node 0."""
        if self._adapter is not GENERIC and time.monotonic() >= self._next_look and not self.has_saved:
            self._next_look = time.monotonic() + LOOK_S
            with contextlib.suppress(OSError):  # the file system does not answer; the next look may see it again
                self._look()
        return self.has_saved

    def _look(self) -> None:
        for line in self._log.new_lines():
            self._read(line)
        newest = self._adapter.newest(self._program, self._place)
        if self._stopping.due(self._stopping.rest_s()):
            self.has_saved = self._is_saved(newest)
        else:
            self._note(newest)

    def exit_code(self, code: int) -> int:
        """Return the exit code of the program: 75 if it has ended early because it was asked to, and has saved."""
        for line in self._log.new_lines():
            self._read(line)
        newest = self._adapter.newest(self._program, self._place)
        # A program that fails has to have saved since the request.
        before = {0: self._first, 1: self._at_stop}
        has_saved = code in before and self._place.run.stop.exists() and newest not in (None, before[code])
        return EXIT_STOPPED if has_saved and not self._is_complete() else code

    def _is_complete(self) -> bool:
        """Return whether the program has made its last step, as its log or the adapter inside it tells."""
        if self._progress is not None:
            return self._progress.step == self._total
        last = next(iter(read_metrics(self._place.run.metrics)[-1:]), {})
        return bool(last) and last["step"] == last["total_steps"]

    def _read(self, line: str) -> None:
        if self._adapter.stops(line):
            with contextlib.suppress(FileExistsError), self._place.run.stop.open("x") as stop:
                stop.write(f"{WALLTIME}\n")
        if (found := self._adapter.progress(line)) is None:
            return
        self._total = found.total or self._total
        if not found.step:
            return
        now, before = time.monotonic(), self._progress
        self._progress = found
        metrics = dict(found.metrics)
        if before is not None and found.step > before.step:
            seconds = metrics.setdefault("timing_s/step", (now - self._last_step_at) / (found.step - before.step))
            if self._adapter.is_hooked:  # it saves at the end of any step
                self._stopping.note_step({_WORK: seconds})
        self._last_step_at = now
        self._metrics.write(found.step, self._total or found.step, metrics)

    def _note(self, newest: Checkpoint | None) -> None:
        """Note the last checkpoint, before the program is asked to stop. Without hooks, it saves at its own times."""
        if newest == self._at_stop:
            return
        now = time.monotonic()
        if not self._adapter.is_hooked:
            self._stopping.note_step({_WORK: now - self._last_saved_at})
        self._at_stop, self._last_saved_at = newest, now

    def _is_saved(self, newest: Checkpoint | None) -> bool:
        """Return whether the program has saved since it was asked to stop, and does not end by itself."""
        if self._is_complete():
            return False
        if newest is None or newest == self._at_stop:
            return newest not in (None, self._first) and self._is_late()
        if self._ends_at is None:
            self._ends_at = time.monotonic() + (GRACE_S if self._adapter.is_hooked else 0.0)
        if time.monotonic() < self._ends_at:
            return self._is_late()
        print(f"hpc-rl: {self._adapter.title} has saved step {newest.step}, and ends: {newest.path}", flush=True)
        return True

    def _is_late(self) -> bool:
        """Return whether the walltime ends in a moment. What was saved before is then better than a timeout."""
        end = self._job_end()
        is_late = end is not None and end - time.time() <= RESERVE_S
        if is_late:
            print(
                f"hpc-rl: the program ({self._adapter.title}) was asked to save, and has not saved before the end of "
                "the walltime. The next attempt resumes from the last checkpoint. To save in time, raise "
                "slurm.warning_s, or save more often",
                flush=True,
            )
        return is_late


def adapted(options: argparse.Namespace, rendezvous: Rendezvous, log: Path) -> AdaptedProgram:
    """Return the program of a node entry. See AdaptedProgram."""
    attempt_dir = rendezvous.attempt_dir
    end = job_end(os.environ, moved_end_file(attempt_dir))
    seconds = None if (at := end()) is None else max(0.0, at - time.time() - options.warning)
    run, nodes = RunDir(attempt_dir.parent), len(rendezvous.nodes)
    place = ProgramPlace(run, nodes, options.processes, seconds).after_attempts(before=attempt_dir.name)
    program = Program(tuple(options.program))
    return AdaptedProgram(ADAPTERS[options.adapter], program, place, end, log, int(options.warning))
