from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.runs import stages
from hpc_rl.runs.stages import Stages, start_phase
from hpc_rl.runs.status import RunStatus

START = "starting: the program loads model and data"


@pytest.mark.parametrize(
    ("state", "files", "phase"),
    [
        ("PENDING", None, "waiting in the queue"),
        ("RUNNING", None, "starting: the job script prepares the nodes"),
        ("RUNNING", ["hosts"], "starting: the job script prepares the nodes"),
        ("RUNNING", ["node0-usage.jsonl", "node0.log"], "starting: the nodes connect to each other"),
        ("RUNNING", ["node0.log", "node0-rank0.log"], START),
        ("RUNNING", ["node0.log", "node0-driver.log"], START),
        ("", ["node0.log"], ""),
    ],
)
def test_what_a_run_does_before_its_first_step(tmp_path: Path, state: str, files: list[str] | None, phase: str) -> None:
    run = RunDir(tmp_path)
    attempt = tmp_path / "attempt-1"
    attempt.mkdir()
    for name in files or ():
        (attempt / name).touch()
    attempts = [attempt] if files is not None else []
    own_program = start_phase(run, state, attempts)
    run.config.touch()
    found = start_phase(run, state, attempts)
    assert found.startswith(phase) and bool(found) == bool(phase)
    assert own_program == ("running" if phase == START else found)
    run.job.write_text(json.dumps({"lends_to": "/runs/math"}))
    has_begun = bool(files) and files != ["hosts"] and bool(state)
    assert start_phase(run, state, attempts) == ("its nodes help run math, or wait for it" if has_begun else found)


def test_an_attempt_that_cannot_be_listed_runs(tmp_path: Path) -> None:
    assert start_phase(RunDir(tmp_path), "RUNNING", [tmp_path / "removed"]) == "running"


def set_age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_stages_have_a_clock_and_end_with_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_LOOK_S", 0.0)
    run, shown = RunDir(tmp_path / "sft-1"), list[str]()
    run.path.mkdir()
    run.config.touch()
    run.metrics.write_text('{"step": 4}\n')  # of an earlier attempt
    set_age(run.metrics, 500)
    run.job.write_text(json.dumps({"job_id": "7"}))
    set_age(run.job, 130)
    found = Stages(run, shown.append)
    assert found.text() == ""  # before Slurm has answered
    found.saw(RunStatus("sft-1", str(run.path), "7", "PENDING", reason="Priority"))
    for _ in range(3):
        found.poll()
    assert shown == ["waiting in the queue (Priority), 2:10"] and found.text() == shown[0]
    set_age(run.job, 259)
    found.poll()
    set_age(run.job, 270)
    found.poll()
    assert shown[1:] == ["waiting in the queue (Priority), 4:30"]  # twice as long
    found.saw(RunStatus("sft-1", str(run.path), "7", "UNKNOWN", is_last_recorded=True))  # Slurm does not answer
    assert found.text() == shown[1]

    found.saw(RunStatus("sft-1", str(run.path), "7", "RUNNING"))
    found.poll()
    run.write_status("7", 1, "RUNNING", None)
    set_age(run.status, 62)
    attempt = run.path / "attempt-1"
    attempt.mkdir()
    (attempt / "node0-rank0.log").touch()
    found.poll()
    assert shown[2:] == [
        "starting: the job script prepares the nodes, 4:30",
        f"{START}; waiting for the first step, 1:02",
    ]
    run.metrics.touch()
    found.poll()
    assert found.text() == "" and len(shown) == 4


@pytest.mark.parametrize(
    ("recorded", "job", "shown"), [("STOPPED", "7", ""), ("STOPPED", "6", "starting"), ("REQUEUED", "7", "starting")]
)
def test_a_job_that_has_just_ended_does_not_start(tmp_path: Path, recorded: str, job: str, shown: str) -> None:
    run = RunDir(tmp_path)
    run.write_status(job, 1, recorded, None)
    run.job.write_text(json.dumps({"job_id": "7"}))
    found = Stages(run, print, "RUNNING")
    assert found.text().startswith(shown) and bool(found.text()) == bool(shown)
