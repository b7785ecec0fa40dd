"""The commands of README's first page as a new user types them, on a real Slurm without GPUs."""

import json
import uuid
from collections.abc import Iterator

import pytest

from tests.conftest import sandbox_cluster
from tests.e2e.workspace import Workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(slurm_tree: str) -> Iterator[Cluster]:
    yield from sandbox_cluster("pytest-first", nodes=4, cpus=2, memory_mb=6000, tree=slurm_tree)


@pytest.fixture(scope="module")
def workspace(cluster: Cluster) -> Workspace:
    """A starter project on a small model."""
    folder = cluster.shared / f"first-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    outside = Workspace(folder, {**cluster.env, "OMP_NUM_THREADS": "1"})
    make_tiny_model(folder / "model", hidden=32, layers=2)
    outside.ok("init", "project", "--model", "model")
    return Workspace(folder / "project", outside.environ)


@pytest.mark.long
def test_sft_on_two_nodes_in_a_starter_project(workspace: Workspace) -> None:
    said = workspace.hpc_rl("submit", "sft", "--nodes", "2", *workspace.hold_at(2))
    assert said.returncode == 0, said.stderr
    assert "  2 nodes x 1 CPU process, 1:00:00, the default partition\n" in said.stdout
    assert "trainer.device=auto: no GPUs found, so the job runs on CPUs" in said.stderr
    workspace.wait_for_step("sft-1", 2)
    workspace.ok("stop", "sft-1")
    workspace.wait_until(lambda: workspace.status("sft-1")["state"] == "STOPPED", "sft-1 stopped")
    again = workspace.hpc_rl("submit", "sft", "--nodes", "2", "--job-name", "sft-1", "optim.lr=2e-5", "--wait")
    assert again.returncode == 0, again.stdout + again.stderr + workspace.logs()
    assert "run sft-1 resumes from step-" in again.stderr and "optim.lr: 1e-05 -> 2e-05" in again.stderr
    assert workspace.status("sft-1")["state"] == "COMPLETED"
    configs = [workspace.folder / "runs" / "sft-1" / f"attempt-{n}" / "config.yaml" for n in (1, 2)]
    assert ["lr: 2.0e-05" in config.read_text() for config in configs] == [False, True]
    listed = json.loads(workspace.ok("runs", "--json"))
    assert [row["run"] for row in listed] == ["sft-1"]
    assert "sft-1" in workspace.ok("clean")
    assert "checkpoints/step-" in workspace.ok("clean", "--checkpoints", "--keep", "0", "--yes")
    assert not list((workspace.folder / "runs" / "sft-1" / "checkpoints").glob("step-*"))


@pytest.mark.long
def test_a_trial_of_ppo_on_four_nodes_in_a_starter_project(workspace: Workspace) -> None:
    small = ["data.train_batch_size=8", "data.max_response_length=8"]
    workspace.ok("submit", "ppo", "--nodes", "4", "--test", "--wait", *small)
    status = workspace.status("ppo-test-1")
    assert (status["state"], status["step"], status["nodes"]) == ("COMPLETED", 2, "node[1-4]")
