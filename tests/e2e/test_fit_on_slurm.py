"""What makes a job fit, on two nodes: offload, rows that ranks share, tokenized data that a later run maps, and a data
set that is read from a hub while the run trains."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.hub_server import HubServer, hub_server
from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.helpers import make_tiny_model
from tests.sandbox import network, state
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


@pytest.fixture(scope="module")
def hub(slurm_cluster: Cluster, workspace: Workspace) -> Iterator[HubServer]:
    """Serve the training data as the data set me/Shelves, at an address that all nodes reach."""
    host = f"{state.read(slurm_cluster.name).subnet}.{network.HOST}"
    make_tiny_model(workspace.folder / "teacher", hidden=48)
    folder = workspace.folder / "hub"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes((workspace.folder / "data" / "train.jsonl").read_bytes())
    with hub_server({}, {"me/Shelves": folder}, host) as server:
        yield server


@pytest.fixture(scope="module")
def online(workspace: Workspace, hub: HubServer) -> Workspace:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(workspace.folder / "home"), "HF_HUB_OFFLINE": "0"}
    return replace(workspace, environ={**workspace.environ, **own})


@pytest.mark.parametrize("kind", ["sft", "distill"])
def test_a_streamed_data_set_on_two_nodes_and_then_on_one(online: Workspace, kind: str) -> None:
    """Windows of 4 batches: the run stops in the second one, and resumes in the middle of it."""
    options = [*OPTIONS, *(["teacher.path=teacher"] if kind == "distill" else [])]
    options = [word for word in options if not word.startswith("data.train_files=")]
    streamed = ["submit", kind, *options, "data.train_files=me/Shelves", "data.stream_rows=32"]
    online.ok(*streamed, "--nodes", "2", "--wait", "--job-name", f"{kind}-whole")
    expected = online.losses(f"{kind}-whole")
    name = f"{kind}-stopped"
    online.ok(*streamed, "--nodes", "2", "--job-name", name, *online.hold_at(6))
    online.wait_for_step(name, 6)
    online.ok("stop", name)
    online.wait_until(lambda: online.status(name)["state"] == "STOPPED", "stopped")
    online.ok(*streamed, "--nodes", "1", "--wait", "--job-name", name)
    status = online.status(name)
    assert (status["state"], status["step"], status["attempt"]) == ("COMPLETED", 8, 2)
    losses = online.losses(name)
    assert list(losses) == list(expected) and len(losses) == 8
    assert all(abs(losses[step] - expected[step]) < 1e-4 for step in expected), (losses, expected)
