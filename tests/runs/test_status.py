from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from hpc_rl.cli.text import status_text
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import current_job, status_of
from tests.fake_slurm import fake_slurm


@pytest.mark.parametrize(("start", "shown"), [("2030-01-02T03:04:05", True), ("N/A", False)])
def test_a_pending_run_shows_when_slurm_expects_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, shown: bool
) -> None:
    programs = fake_slurm(tmp_path, monkeypatch)
    (programs / "squeue.text").write_text(f"7 |PENDING |  |Priority |{start} |\n")
    run = RunDir(tmp_path / "sft-1")
    run.path.mkdir()
    run.job.write_text(json.dumps({"job_id": "7"}))
    now = status_of(run)
    assert (now.state, now.reason) == ("PENDING", "Priority")
    assert ("expected start  2030-01-02 03:04:05" in status_text(now)) == shown
    assert json.loads(now.as_json())["expected_start"] == (start if shown else "")


def test_the_job_that_holds_the_lock_counts_not_the_one_submitted_last(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_status("12", 1, "RUNNING", None)
    run.job.write_text(json.dumps({"job_id": "13"}))
    run.lock.write_text("11\n12\n")
    assert current_job(run) == "13"
    with run.lock.open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert current_job(run) == "12"
        run.write_status("12", 1, "COMPLETED", 0)  # another one has just taken the lock, and not written its id yet
        run.job.write_text(json.dumps({"job_id": "13"}))
        assert current_job(run) == "13"


def test_looking_at_the_lock_leaves_it_free(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.holder() is None
    run.lock.write_text("12\n")
    assert run.holder() is None
    with run.lock.open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
