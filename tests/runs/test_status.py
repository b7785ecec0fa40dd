from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_rl.cli.text import status_text
from hpc_rl.run_dir import RunDir
from hpc_rl.runs.status import status_of
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
