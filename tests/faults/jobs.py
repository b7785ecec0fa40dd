"""What the tests of faults share: small jobs, what their steps measured, and what they leave on the nodes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.test_ppo_on_slurm import PPO, REWARD
from tests.e2e.workspace import Workspace, make_workspace
from tests.sandbox.cluster import Cluster
from tests.sandbox.spec import TMP

SMALL_PPO = [*PPO, "data.train_batch_size=8", "actor.mini_batch_size=16"]
_LEFT = r"""
for process in /proc/[0-9]*; do
  if grep -qsz '^SLURM_JOB_ID=' $process/environ; then tr '\0\n' '  ' < $process/cmdline; echo; fi
done
find /tmp /dev/shm -mindepth 1 -maxdepth 1
"""
"""Lists every process that a job has started, and the files in the folders that all jobs share."""


def workspace_on(cluster: Cluster, name: str) -> Workspace:
    """Create a new folder for runs of both kinds: with a model, data and a reward function."""
    workspace = make_workspace(cluster.shared / f"{name}-{uuid.uuid4().hex[:8]}", cluster.env)
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "400", "--val", "40")
    (workspace.folder / "reward.py").write_text(REWARD)
    return workspace


def measured(run: Path) -> list[tuple[int, float]]:
    """Return what each step measured: the loss, or the mean reward. A repeated step is there twice."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    # A full disk cuts a line off.
    records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    names = ("train/loss", "critic/score/mean")
    return [(record["step"], record[name]) for record in records for name in names if name in record]


def steps_lost(steps: list[tuple[int, float]]) -> int:
    """Return how many of the steps that a run has measured it had to repeat."""
    return len(steps) - len(dict(steps))


def left_on(cluster: Cluster, nodes: Iterable[str]) -> list[str]:
    """Return processes and files of jobs that are still on these nodes."""
    own = {str(TMP / Path(folder).relative_to(TMP).parts[0]) for folder in cluster.spec.shared_tmp}
    found = [line for node in nodes for line in cluster.exec_on(node, ["bash", "-c", _LEFT]).stdout.splitlines()]
    return [line for line in found if line not in own]


def left_behind(cluster: Cluster, run: Path) -> str:
    """Wait until the nodes are idle, and check that the job of a run has left nothing on them, and no token.

    Returns:
        what to record in the table.
    """
    cluster.wait_idle()
    found = [*left_on(cluster, cluster.nodes), *map(str, run.glob("attempt-*/.ray-token"))]
    assert not found, found
    return "nothing"
