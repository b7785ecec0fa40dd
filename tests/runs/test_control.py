"""Waiting for a job, with a clock of the test's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.runs import control
from hpc_rl.runs.status import RunStatus
from hpc_rl.slurm import commands
from tests.runs.test_status import SilentSlurm


class Job:
    """A job that writes its last state at one time, and that Slurm shows as running until a later time."""

    def __init__(self, run: RunDir, writes_at: float, ends_at: float) -> None:
        self.run, self.writes_at, self.ends_at = run, writes_at, ends_at
        self.now = 0.0
        self.asked: list[float] = []
        run.status.write_text("RUNNING")

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 10_000 + self.now

    def sleep(self, seconds: float) -> None:
        if self.now < self.writes_at <= self.now + seconds:
            self.run.status.write_text("COMPLETED")
        self.now += seconds

    def status_of(self, run: RunDir, _within_s: float) -> RunStatus:
        self.asked.append(self.now)
        state = "COMPLETED" if self.now >= self.ends_at else "RUNNING"
        return RunStatus(run.name, str(run.path), "7", state, exit_code=0)


@pytest.mark.parametrize("still_shown_for", [0.0, 0.9, 3.0])
def test_the_end_is_seen_soon_after_the_job_has_written_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still_shown_for: float
) -> None:
    job = Job(RunDir(tmp_path), writes_at=1000, ends_at=1000 + still_shown_for)
    monkeypatch.setattr(control, "time", job)
    monkeypatch.setattr(control, "status_of", job.status_of)
    assert control.wait(job.run) == 0
    assert job.ends_at <= job.now < job.ends_at + 2
    longest = control.STATE_POLL_S[1]
    assert len([at for at in job.asked if at < 1000]) < 1000 / longest + 10, "Slurm is asked too often"


def test_a_job_that_writes_nothing_is_seen_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(RunDir(tmp_path), writes_at=2000, ends_at=1000)
    monkeypatch.setattr(control, "time", job)
    monkeypatch.setattr(control, "status_of", job.status_of)
    assert control.wait(job.run) == 0
    assert 1000 <= job.now < 1000 + control.STATE_POLL_S[1] + 1


ENDED = RunStatus("a", "a", "7", "NODE_FAIL", exit_code=1)
LOOKS_ENDED = RunStatus("a", "a", "7", "NODE_FAIL", exit_code=1, may_return=True)
PENDING = RunStatus("a", "a", "7", "PENDING")


@pytest.mark.parametrize(
    ("looks", "ends_at"),
    [
        ([(0, PENDING), (5, ENDED)], 5),
        ([(0, LOOKS_ENDED), (15, LOOKS_ENDED), (59, LOOKS_ENDED), (60, LOOKS_ENDED)], 60),
        ([(7, LOOKS_ENDED), (8, PENDING), (70, LOOKS_ENDED), (129, LOOKS_ENDED), (131, LOOKS_ENDED)], 131),
        ([(0, LOOKS_ENDED), (2, ENDED)], 2),
        ([(0, LOOKS_ENDED), (2, PENDING), (500, PENDING)], None),
    ],
)
def test_a_job_that_queued_itself_again_ends_when_it_has_looked_ended_for_a_minute(
    looks: list[tuple[float, RunStatus]], ends_at: float | None
) -> None:
    ending = control.EndDetector()
    assert next((at for at, now in looks if ending.seen(now, at)), None) == ends_at


def test_waiting_goes_on_while_slurm_queues_a_job_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(RunDir(tmp_path), writes_at=1000, ends_at=1000)

    def status_of(run: RunDir, within_s: float) -> RunStatus:
        return LOOKS_ENDED if 100 <= job.now < 140 else job.status_of(run, within_s)

    monkeypatch.setattr(control, "time", job)
    monkeypatch.setattr(control, "status_of", status_of)
    assert control.wait(job.run) == 0
    assert job.now >= 1000


@pytest.mark.parametrize(
    ("written_at", "returns_at", "state", "until"),
    [
        (0, 20, "COMPLETED", (20, 28)),
        (0, 1e9, "NODE_FAIL", (60, 75)),
        (-50, 1e9, "NODE_FAIL", (10, 16)),
        (-61, 20, "NODE_FAIL", (0, 0)),  # Slurm has had its time
        (5000, 1e9, "NODE_FAIL", (60, 75)),  # on another clock
    ],
)
def test_the_status_of_a_job_that_has_queued_itself_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written_at: float,
    returns_at: float,
    state: str,
    until: tuple[float, float],
) -> None:
    job = Job(RunDir(tmp_path), writes_at=0, ends_at=0)
    os.utime(job.run.status, (10_000 + written_at, 10_000 + written_at))

    def status_of(run: RunDir, within_s: float) -> RunStatus:
        return LOOKS_ENDED if job.now < returns_at else job.status_of(run, within_s)

    monkeypatch.setattr(control, "time", job)
    monkeypatch.setattr(control, "status_of", status_of)
    monkeypatch.setattr(control, "statuses_of", lambda runs: [status_of(run, 9) for run in runs])
    assert [now.state for now in control.settled_statuses([job.run])] == [state]
    assert until[0] <= job.now <= until[1]


def test_a_silent_controller_does_not_end_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`submit --wait` and `logs -f` wait so."""
    run = RunDir(tmp_path)
    run.job.write_text('{"job_id": "7"}')
    run.write_status("7", 1, "RUNNING", None)
    slurm = SilentSlurm(monkeypatch)
    monkeypatch.setattr(control, "time", slurm)

    def answers_after_an_hour(argv: list[str], timeout: float, **settings: object) -> subprocess.CompletedProcess[str]:
        if slurm.now < 3600:
            return slurm.run(argv, timeout, **settings)
        found = "7|COMPLETED|0:0|node1|None\n" if argv[0] == "sacct" else ""
        return subprocess.CompletedProcess(argv, 0, found, "")

    monkeypatch.setattr(commands.subprocess, "run", answers_after_an_hour)
    assert control.wait(run) == 0
    assert 3600 <= slurm.now < 3700
