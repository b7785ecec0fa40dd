"""What the tests of faults share: small jobs, what their steps measured, and what they leave on the nodes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from pathlib import Path

from tests.e2e.test_ppo_on_slurm import PPO, REWARD
from tests.e2e.workspace import Workspace, make_workspace
from tests.sandbox.cluster import Cluster

SMALL_PPO = [*PPO, "data.train_batch_size=8", "actor.mini_batch_size=16"]
_LEFT = "hpc_rl[.](node|finetune|rl)|^ray::|gcs_server|raylet"
"""Processes of a job that must not be there after its end."""


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


def left_on(cluster: Cluster, nodes: Iterable[str]) -> str:
    """Return processes and folders of jobs that are still on these nodes."""
    commands = (["pgrep", "-fa", _LEFT], ["sh", "-c", "ls -d /tmp/0.*"])
    return "".join(cluster.exec_on(node, command).stdout for node in nodes for command in commands)
