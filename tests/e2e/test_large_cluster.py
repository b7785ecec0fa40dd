"""With a thousand nodes and jobs, commands call Slurm as often as with a few."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.workspace import Workspace
from tests.sandbox.calls import SlurmCalls
from tests.sandbox.cluster import Cluster

pytestmark = pytest.mark.sandbox


def copy_run(run: Path, count: int) -> None:
    """Create further runs, whose jobs are the cluster's held ones: tasks of ten arrays of a hundred."""
    for number in range(count):
        copy = run.with_name(f"copy-{number}")
        shutil.copytree(run, copy, dirs_exist_ok=True)
        job = json.loads((copy / "job.json").read_text())
        (copy / "job.json").write_text(json.dumps(job | {"job_id": f"{1 + number // 100}_{number % 100}"}))


def test_a_constant_number_of_calls(large_cluster: Cluster, tmp_path: Path) -> None:
    folder = large_cluster.shared / "project"
    folder.mkdir()
    (folder / "train.py").touch()
    calls = SlurmCalls(tmp_path, large_cluster.env)
    workspace = Workspace(folder, calls.environ)

    workspace.ok("site", "detect", "--yes", "--out", "site.yaml")
    detected = calls.take()
    asked = [call for call in detected if call != "sbatch --test-only"]
    assert len(asked) <= 6 and len(set(asked)) == len(asked)
    partitions = 3  # sbatch refuses every test job here, so each of them is tried
    assert len(detected) - len(asked) <= 10 * partitions, "options that sbatch is asked about"

    hold = ["--sbatch", "hold", "--job-name", "held"]
    workspace.ok("submit", "torchrun", "--nodes", "2", "--gpus-per-node", "8", *hold, "--", "train.py")
    calls.take()
    assert workspace.status("held")["state"] == "PENDING"
    assert len(calls.take()) <= 4

    counts = []
    for copies in (1, 1000):
        copy_run(folder / "runs" / "held", copies)
        listed = json.loads(workspace.ok("runs", "--json"))
        assert [run["state"] for run in listed] == ["PENDING"] * (copies + 1)
        counts.append(len(calls.take()))
    assert counts[0] == counts[1] <= 3
