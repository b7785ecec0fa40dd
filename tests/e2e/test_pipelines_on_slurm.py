"""A pipeline on a real Slurm: all stages are queued at once; a cancelled one ends those after it; requeue continues."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
import yaml

from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

_TRAIN = dict(word.split("=", 1) for word in QUICK if not word.startswith("model.path"))
TWICE: dict[str, Any] = {
    "values": {"model": None},
    "rounds": 2,
    "stages": {
        "train": {
            "kind": "sft",
            "options": {**_TRAIN, "model.path": "@model", "trainer.total_training_steps": 3, "trainer.seed": "@round"},
            "becomes": "model",
        },
        "again": {
            "kind": "sft",
            "options": {**_TRAIN, "model.path": "@train", "trainer.total_training_steps": 3},
            "becomes": "model",
        },
    },
}
NAMES = ["twice_1-train", "twice_1-again", "twice_2-train", "twice_2-again"]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    workspace = make_workspace(slurm_cluster.shared / f"pipelines-{uuid.uuid4().hex[:8]}", slurm_cluster.env)
    (workspace.folder / "twice.yaml").write_text(yaml.safe_dump(TWICE, sort_keys=False))
    return workspace


def states(workspace: Workspace) -> dict[str, str]:
    return {row["run"]: row["state"] for row in json.loads(workspace.ok("status", "twice", "--json"))}


@pytest.mark.long
def test_a_pipeline_is_cancelled_and_continued(workspace: Workspace) -> None:
    held = [f"train.{word}" for word in workspace.hold_at(2)]
    shown = workspace.ok(
        "chain", "twice.yaml", "--job-name", "twice", "--mem", "2G", "--nodes", "2", "model=model", *held
    )
    assert "4 stages: " + ", ".join(NAMES) in shown
    workspace.release("twice/twice_2-train")  # only the first round waits
    workspace.wait_for_step("twice/twice_1-train", 2)
    assert list(states(workspace)) == NAMES
    assert states(workspace)["twice_1-again"] == "PENDING"
    assert "nothing to resume" in workspace.ok("requeue", "twice")
    workspace.ok("cancel", "twice_1-train")
    workspace.wait_until(lambda: states(workspace)["twice_1-train"] == "CANCELLED", "it is cancelled")
    shown = workspace.ok("requeue", "twice")  # perhaps before Slurm has removed those after it
    assert "4 of 4 stages of pipeline twice, from twice_1-train on" in shown
    workspace.ok("cancel", "twice_1-train")
    workspace.wait_until(lambda: set(states(workspace).values()) == {"CANCELLED"}, "those after it are cancelled")

    workspace.release("twice/twice_1-train")
    assert "4 of 4 stages of pipeline twice, from twice_1-train on" in workspace.ok("requeue", "twice")
    workspace.wait_until(lambda: set(states(workspace).values()) == {"COMPLETED"}, "all stages completed")
    assert "nothing to resume" in workspace.ok("requeue", "twice")
    losses = {name: workspace.losses(f"twice/{name}") for name in NAMES}
    assert all(sorted(each) == [1, 2, 3] for each in losses.values())
    assert losses["twice_1-again"][1] < losses["twice_1-train"][1], "it trains the model of the stage before it"
    assert losses["twice_2-train"][1] < losses["twice_1-again"][1]

    table = workspace.ok("status", "twice")
    assert table.splitlines()[0].split()[:5] == ["run", "round", "stage", "job", "state"]
    workspace.ok("report", "twice")
    page = (workspace.folder / "runs" / "twice" / "report.html").read_text()
    assert "<h1>pipeline twice</h1>" in page and "twice_2-again" in page
    assert "twice is a pipeline: name one of its runs" in workspace.hpc_rl("logs", "twice").stderr


def test_a_stage_that_slurm_refuses_leaves_nothing(workspace: Workspace) -> None:
    done = workspace.hpc_rl("chain", "twice.yaml", "--job-name", "none", "model=model", "again.slurm.partition=nowhere")
    assert done.returncode == 2 and "nowhere" in done.stderr
    assert not (workspace.folder / "runs" / "none").exists()
