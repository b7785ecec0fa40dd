"""A run's history on a Slurm with accounting: what nodes record, and what sacct adds if they could not."""

from __future__ import annotations

import time

import pytest

from hpc_rl.run_dir import RunDir
from hpc_rl.runs.reporting import accounted_histories
from hpc_rl.runs.status import status_of
from hpc_rl.tracking.history import KILLED, History, read_history
from tests.e2e.workspace import Workspace
from tests.sandbox.cluster import Cluster
from tests.sandbox.processes import DEADLINE_S

pytestmark = pytest.mark.sandbox

PROGRAM = """\
import os, pathlib, sys, time
held = b"1" * 50_000_000
attempt = pathlib.Path(os.environ["HPC_RL_ATTEMPT_DIR"])
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    lines = [len(path.read_text().splitlines()) for path in attempt.glob("*-usage.jsonl")]
    if attempt.name == "attempt-2" and len(lines) == 2 and min(lines) > 1:
        sys.exit(0)
    time.sleep(0.1)
sys.exit("nobody measured this job, or nobody ended it")
"""
"""Runs until it is ended in the first attempt, and until both nodes have a sample in the second attempt."""


def accounted(run: RunDir) -> History:
    (found,) = accounted_histories([run], [status_of(run)])
    return found


@pytest.mark.long
def test_a_job_that_slurm_killed_and_queued_again(accounting_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = accounting_cluster.shared / "history"
    folder.mkdir()
    workspace = Workspace(folder, {**accounting_cluster.env, "OMP_NUM_THREADS": "1"})
    (folder / "nap.py").write_text(PROGRAM)
    options = ["trainer.device=cpu", "slurm.requeue=true", "--nodes", "2", "--job-name", "nap"]
    workspace.ok("submit", "torchrun", *options, "--", "nap.py")
    run = RunDir(folder / "runs" / "nap")
    job_id = str(workspace.status("nap")["job_id"])
    first = run.path / "attempt-1"
    workspace.wait_until(lambda: len(list(first.glob("node*-rank*.log"))) == 2, "both ranks run")
    workspace.wait_until(lambda: read_history(run).node_hours > 0, "a first sample")
    accounting_cluster.run(["scontrol", "requeue", job_id], check=True)
    workspace.wait_until((run.path / "attempt-2").exists, "a second attempt")
    accounting_cluster.wait_job(job_id)

    for name, value in accounting_cluster.env.items():
        monkeypatch.setenv(name, value)
    found, deadline = accounted(run), time.monotonic() + DEADLINE_S
    while found.attempts[0].state == KILLED and time.monotonic() < deadline:  # slurmdbd is told a little later
        found = accounted(run)
    killed, completed = found.attempts
    assert (killed.state, killed.job_id, killed.nodes) == ("REQUEUED", job_id, 2)
    assert (completed.state, completed.exit_code, completed.nodes) == ("COMPLETED", 0, 2)
    assert found.requeues == 1
    # Slurm counts from the allocation, nodes count from their entry.
    assert killed.node_hours >= read_history(run).attempts[0].node_hours > 0
    assert 2 * 2 <= completed.node_hours * 3600 < 2 * 600  # the first sample comes after 2 s

    workspace.ok("report", "nap")
    page = run.report.read_text()
    assert "2 attempts, 1 by requeue" in page and "node1" in page and "node2" in page and "Memory per node" in page
