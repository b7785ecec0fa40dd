"""A user's program under its adapter: its command in this attempt, its progress, and its early end."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter, Place, Progress
from hpc_rl.adapters.inside import on_path
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.table import ADAPTERS
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.liveness.walltime import RESERVE_S, WalltimeEnd, job_end
from hpc_rl.node.rendezvous import Rendezvous
from hpc_rl.run_dir import RunDir, moved_end_file
from hpc_rl.system.files import ATTEMPT, Follower
from hpc_rl.tracking.metrics import MetricsFile

LOOK_S = 1.0
"""Interval between looks at the log, the stop file and the checkpoints, which are on a shared file system."""


class AdaptedProgram:
    """The program of a job on this node.

    Args:
        program: as it was submitted.
        log: what node 0's process writes.
    """

    def __init__(self, adapter: Adapter, program: Program, place: Place, job_end: WalltimeEnd, log: Path) -> None:
        self._adapter, self._program, self._place, self._job_end = adapter, program, place, job_end
        self._log = Follower(log)
        self._metrics = MetricsFile(self._place.run.metrics)
        self._first = self._at_stop = self._adapter.newest(self._program, self._place)
        self._was_asked = False
        self._progress: Progress | None = None
        self._last_step_at = time.monotonic()
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
            found["PYTHONPATH"] = os.pathsep.join(folders)
        return found

    def must_end(self) -> bool:
        """Look at the program, and return whether it has saved and is to be ended. Called often, on node 0."""
        if time.monotonic() >= self._next_look and not self.has_saved:
            self._next_look = time.monotonic() + LOOK_S
            for line in self._log.new_lines():
                self._read(line)
            self.has_saved = self._place.run.stop.exists() and self._is_saved()
        return self.has_saved

    def exit_code(self, code: int) -> int:
        """Return the exit code of the program: 75 if it has ended early because it was asked to, and has saved."""
        for line in self._log.new_lines():
            self._read(line)
        is_complete = self._progress is not None and self._progress.step == self._progress.total
        newest = self._adapter.newest(self._program, self._place)
        has_saved = self._place.run.stop.exists() and newest not in (None, self._first)
        return EXIT_STOPPED if has_saved and code in (0, 1) and not is_complete else code

    def _read(self, line: str) -> None:
        if (found := self._adapter.progress(line)) is None:
            return
        now, before = time.monotonic(), self._progress
        self._progress = found
        metrics = dict(found.metrics)
        if before is not None and found.step > before.step:
            metrics.setdefault("timing_s/step", (now - self._last_step_at) / (found.step - before.step))
        self._last_step_at = now
        self._metrics.write(found.step, found.total or found.step, metrics)

    def _is_saved(self) -> bool:
        newest = self._adapter.newest(self._program, self._place)
        if not self._was_asked:
            self._was_asked, self._at_stop = True, newest
        if newest is None or self._adapter.is_hooked:
            return self._is_late() and newest not in (None, self._first)
        if newest != self._at_stop:
            print(f"hpc-rl: {self._adapter.title} has saved step {newest.step}, and ends: {newest.path}", flush=True)
            return True
        return self._is_late() and newest != self._first

    def _is_late(self) -> bool:
        """Return whether the walltime ends in a moment. What was saved before is then better than a timeout."""
        end = self._job_end()
        is_late = end is not None and end - time.time() <= RESERVE_S
        if is_late:
            print(
                f"hpc-rl: {self._adapter.title} has not saved since it was asked to stop, and the walltime ends: it "
                "resumes from its last checkpoint; raise slurm.warning_s, or have it save more often",
                flush=True,
            )
        return is_late


def adapted(options: argparse.Namespace, rendezvous: Rendezvous, log: Path) -> AdaptedProgram:
    """Return the program of a node entry. See AdaptedProgram."""
    attempt_dir = rendezvous.attempt_dir
    end = job_end(os.environ, moved_end_file(attempt_dir))
    seconds = None if (at := end()) is None else max(0.0, at - time.time() - options.warning)
    place = _place(attempt_dir, Place(RunDir(attempt_dir.parent), len(rendezvous.nodes), options.processes, seconds))
    return AdaptedProgram(ADAPTERS[options.adapter], Program(tuple(options.program)), place, end, log)


def _place(attempt_dir: Path, place: Place) -> Place:
    """Return the place with what is known about earlier attempts."""
    number = ATTEMPT.fullmatch(attempt_dir.name)
    if number is None or int(number[1]) == 1:
        return replace(place, began=time.time())
    first = attempt_dir.with_name("attempt-1")
    times = [path.stat().st_mtime for path in first.iterdir()] if first.is_dir() else []
    return replace(place, is_later=True, began=min(times, default=0.0))
