"""What the terminal shows of a run while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.runs.follow import ProgressView, RunView


def test_the_progress_has_all_lines_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(ProgressView, "update", lambda self, record: shown.append(record))
    run = RunDir(tmp_path)
    stages: list[str] = []
    view = RunView(run, stages.append, "RUNNING")
    view.poll()
    assert stages == ["starting: the job script prepares the nodes, 0:00"]
    for line in ({"step": 1, "train/loss": 2.0}, {"step": 1, "val/loss": 3.0}, {"step": 2, "train/loss": 1.0}):
        with run.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        view.poll()
    view.poll()
    assert shown == [
        {"step": 1, "train/loss": 2.0},
        {"step": 1, "train/loss": 2.0, "val/loss": 3.0},
        {"step": 2, "train/loss": 1.0},
    ]
