"""What makes a job fit, on two nodes: offload, rows that ranks share, and tokenized data that a later run maps."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.long]
OPTIONS = [*QUICK, "trainer.total_training_steps=8"]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return make_workspace(slurm_cluster.shared / f"fit-{uuid.uuid4().hex[:8]}", slurm_cluster.env)


@pytest.fixture(scope="module")
def expected(workspace: Workspace) -> dict[int, float]:
    """Losses of a run without any of it."""
    workspace.ok("submit", "sft", "--nodes", "2", "--wait", "--job-name", "plain", *OPTIONS)
    return workspace.losses("plain")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("offload", ["trainer.offload=optimizer"]),
        ("half-recomputed", ["trainer.offload=optimizer", "model.enable_gradient_checkpointing=half"]),
        ("activations", ["model.enable_gradient_checkpointing=true", "model.enable_activation_offload=true"]),
        ("shared-rows", ["trainer.sequence_parallel=2", "trainer.n_gpus_per_node=2", "--cpus-per-task", "2"]),
    ],
)
def test_stopped_on_two_nodes_and_resumed_on_one(
    workspace: Workspace, expected: dict[int, float], name: str, options: list[str]
) -> None:
    command = ["submit", "sft", "--job-name", name, *OPTIONS, *options]
    workspace.ok(*command, "--nodes", "2", *workspace.hold_at(3))
    workspace.wait_for_step(name, 3)
    workspace.ok("stop", name)
    workspace.wait_until(lambda: workspace.status(name)["state"] == "STOPPED", "stopped")
    workspace.ok(*command, "--nodes", "1", "--wait")
    status = workspace.status(name)
    assert (status["state"], status["step"], status["attempt"]) == ("COMPLETED", 8, 2)
    losses = workspace.losses(name)
    assert losses.keys() == expected.keys()
    assert all(abs(losses[step] - expected[step]) < 1e-4 for step in expected), (losses, expected)


def test_later_runs_map_the_data_of_the_first(workspace: Workspace, expected: dict[int, float]) -> None:
    def files() -> dict[Path, int]:
        found = (workspace.folder / "runs").glob(".tokenized-*/**/*.arrow")
        return {path: path.stat().st_mtime_ns for path in found}

    before = files()
    assert before
    workspace.ok("submit", "sft", "--nodes", "2", "--wait", "--job-name", "later", *OPTIONS)
    assert files() == before
    assert workspace.losses("later") == expected
