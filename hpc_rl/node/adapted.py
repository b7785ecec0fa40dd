"""A user's program under its adapter: its command in this attempt, its progress, and its early end."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_rl.adapters.adapter import Adapter, ProgramPlace, ReportedStep
from hpc_rl.adapters.inside.hooks import hooked
from hpc_rl.adapters.program import Program
from hpc_rl.adapters.saved import Checkpoint
from hpc_rl.adapters.table import ADAPTERS, GENERIC, started
from hpc_rl.errors import EXIT_STOPPED
from hpc_rl.liveness.walltime import RESERVE_S, WalltimeEnd, job_end
from hpc_rl.node.ending import create_once
from hpc_rl.node.rank import ENV_OF_FIRST
from hpc_rl.node.rendezvous import Rendezvous
from hpc_rl.run_dir import WALLTIME, RunDir, moved_end_file
from hpc_rl.system.files import Follower, read_regular
from hpc_rl.tracking.metrics import MetricsFile, read_metrics
from hpc_rl.training.stopping import Stopping

GRACE_S = 30.0
"""For a program to end by itself, once it has saved because it was asked to."""
LOOK_S = 1.0
"""Interval between looks at the log, the stop file and the checkpoints, which are on a shared file system."""
_WORK = "timing_s/work"
"""Time until the program can save."""

_WANDB = frozenset({"WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID"})
"""Variables of a user who has chosen wandb's run himself."""


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
        self._at_start = self._before_stop = self._adapter.newest(self._program, self._place)
        """The last checkpoint before this attempt, and before the program was asked to stop."""
        self._ends_at: float | None = None
        self._progress: ReportedStep | None = None
        self._total: int | None = None
        self._last_step_at = self._last_saved_at = time.monotonic()
        self._next_look = 0.0
        self._has_warned = False
        self.has_saved = False
        """Whether the program has saved since it was asked to stop, and is to be ended."""

    @property
    def words(self) -> list[str]:
        """The command of this attempt."""
        return [*self._program.words, *self._adapter.arguments(self._program, self._place)]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with the variables of the adapter. Those that the user has exported take precedence."""
        found = {**self._adapter.environment(self._program, self._place), **environ, **self._wandb(environ)}
        return hooked(found, self._adapter.hook) if self._adapter.hook else found

    def _wandb(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return variables by which all attempts of the run are one run of wandb, unless the user has chosen one."""
        of_other_job = environ.get(ENV_OF_FIRST, "").split()  # the job that has submitted this one
        own = set(environ).difference(of_other_job)
        if self._adapter is GENERIC or not _WANDB.isdisjoint(own):
            return {}
        file = self._place.run.path / ".wandb-id"
        create_once(file, secrets.token_hex(4))
        with contextlib.suppress(OSError):
            run_id = read_regular(file).decode()
            return {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow", ENV_OF_FIRST: "WANDB_RUN_ID WANDB_RESUME"}
        return {}

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
        before = {0: self._at_start, 1: self._before_stop}
        has_saved = code in before and self._place.run.stop.exists() and newest not in (None, before[code])
        return EXIT_STOPPED if has_saved and not self._is_complete(code == 0) else code

    def _is_complete(self, has_ended: bool = False) -> bool:
        """Return whether the program has made its last step, as its log or the adapter inside it tells.

        Args:
            has_ended: whether it has ended by itself, without an error.
        """
        if self._progress is not None and self._total is not None:
            return self._progress.step == self._total
        if not self._adapter.saves_when_asked:  # it is not asked to end
            return has_ended
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
            if self._adapter.saves_when_asked:
                self._stopping.note_step({_WORK: seconds})
        self._last_step_at = now
        self._metrics.write(found.step, self._total or found.step, metrics)

    def _note(self, newest: Checkpoint | None) -> None:
        """Note the last checkpoint, before the program is asked to stop."""
        if newest == self._before_stop:
            return
        now = time.monotonic()
        if not self._adapter.saves_when_asked:
            self._stopping.note_step({_WORK: now - self._last_saved_at})
        self._before_stop, self._last_saved_at = newest, now

    def _is_saved(self, newest: Checkpoint | None) -> bool:
        """Return whether the program, which was asked to stop, is to be ended.

        It has saved, and does not end by itself; or the walltime ends in a moment, and what this attempt has saved
        before is better than a timeout.
        """
        if self._is_complete():
            return False
        now, end = time.monotonic(), self._job_end()
        is_late = end is not None and end - time.time() <= RESERVE_S
        if newest is not None and newest != self._before_stop:
            if self._ends_at is None:
                self._ends_at = now + (GRACE_S if self._adapter.ends_itself else 0.0)
            if now < self._ends_at and not is_late:
                return False
            print(f"hpc-rl: {self._adapter.title} has saved step {newest.step}, and ends: {newest.path}", flush=True)
            return True
        saved = None if newest == self._at_start else newest
        if is_late and not self._has_warned:
            self._has_warned = True
            what = f"The next attempt resumes from {saved.path}" if saved else "This attempt has saved nothing"
            print(
                f"hpc-rl: {self._adapter.title} was asked to save, and has not saved before the end of the walltime. "
                f"{what}. To save in time, raise slurm.warning_s, or save more often",
                flush=True,
            )
        return is_late and saved is not None


def adapted(options: argparse.Namespace, rendezvous: Rendezvous, log: Path) -> AdaptedProgram:
    """Return the program of a node entry. See AdaptedProgram."""
    attempt_dir = rendezvous.attempt_dir
    end = job_end(os.environ, moved_end_file(attempt_dir))
    seconds = None if (at := end()) is None else max(0.0, at - time.time() - options.warning)
    run, nodes = RunDir(attempt_dir.parent), len(rendezvous.nodes)
    place = ProgramPlace(run, nodes, options.processes, seconds).after_attempts(before=attempt_dir.name)
    adapter = ADAPTERS[options.adapter]
    program = Program(started(adapter, Program(tuple(options.program))))
    return AdaptedProgram(adapter, program, place, end, log, int(options.warning))
