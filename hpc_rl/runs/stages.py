"""What a run does before its first step, with a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_rl.liveness.activity import printed
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import STOPPED, RunStatus, current_job
from hpc_rl.slurm.states import ENDED
from hpc_rl.tracking.formatting import duration

_LOOK_S = 1.0
"""Interval between two looks at the files of the run."""
_REPEAT_S = 60.0
"""A stage is named again after this time, and then whenever it has lasted twice as long."""


class Stages:
    """The stage of a run until its present attempt has completed a step.

    Args:
        note: receives a line for each stage, from `poll`.
        state: of the run, until `saw` is called; empty if it is not known.
    """

    def __init__(self, run: RunDir, note: Callable[[str], None], state: str = "") -> None:
        printed()
        self._run = run
        self._note = note
        self._state = state
        self._reason = ""
        self._next_look = 0.0
        self._stage = ("", 0.0)
        self._said, self._next_line = "", 0.0

    def saw(self, now: RunStatus) -> None:
        """Receive the status of the run."""
        if now.is_last_recorded:  # Slurm does not answer
            return
        state = now.state if now.active else ""
        if state != self._state:
            self._next_look = 0.0
        self._state, self._reason = state, now.reason if state == "PENDING" else ""

    def text(self) -> str:
        """Return the stage and for how long the run has been queued, or has been running; empty after a step."""
        if time.monotonic() >= self._next_look:
            self._stage = self._look()
            self._next_look = time.monotonic() + _LOOK_S
        stage, since = self._stage
        reason = f" ({self._reason})" if self._reason else ""
        return f"{stage}{reason}, {duration(time.time() - since)}" if stage else ""

    def poll(self) -> None:
        """Pass the text on if the stage is a new one, or has lasted long."""
        text = self.text()
        stage, since = self._stage
        lasted_s = time.time() - since
        if stage and (stage != self._said or lasted_s >= self._next_line):
            self._said, self._next_line = stage, max(_REPEAT_S, 2 * lasted_s)
            self._note(text)

    def _look(self) -> tuple[str, float]:
        """Return the stage, and when the state of the run began."""
        files = [file for file in (self._run.job, self._run.status) if file.exists()]
        since = max((file.stat().st_mtime for file in files), default=time.time())
        own = self._run.read_status()
        has_begun = own.get("state") == "RUNNING"
        has_stepped = has_begun and self._run.metrics.exists() and self._run.metrics.stat().st_mtime > since
        has_ended = own.get("state") in (*ENDED, STOPPED) and own.get("job_id") == current_job(self._run)
        if has_stepped or (has_ended and self._state != "PENDING"):
            return "", since
        return start_phase(self._run, self._state, self._run.attempts() if has_begun else []), since


def start_phase(run: RunDir, state: str, attempts: Sequence[Path]) -> str:
    """Describe what a run does before its first step, by the files that its attempt has so far.

    Args:
        state: of the run; empty if it is not active.
    """
    if not state:
        return ""
    if state == "PENDING":
        return "waiting in the queue"
    try:
        names = {path.name for path in attempts[-1].iterdir()} if attempts else set()
    except OSError:  # it is that of another user, or has just been removed
        return "running"
    if not any(name.startswith("node") for name in names):
        return "starting: the job script prepares the nodes"
    if lends_to := run.read_job().get("lends_to"):
        return f"its nodes help run {Path(lends_to).name}, or wait for it"
    trains = run.config.exists()  # its program is one of hpc-rl, which reports steps
    if "node0-driver.log" in names or any("-rank" in name and name.startswith("node") for name in names):
        return "starting: the program loads model and data; waiting for the first step" if trains else "running"
    return "starting: the nodes connect to each other"
