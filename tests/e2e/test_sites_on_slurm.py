"""From `site detect` to trained models on different kinds of clusters, without editing the profile."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import sandbox_cluster
from tests.e2e.workspace import Workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster
from tests.sandbox.variants import VARIANTS

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

DATA = ["model.path=model", "data.train_files=sums/train.jsonl", "trainer.device=cpu", "trainer.micro_tokens=1024"]
SFT = [*DATA, "data.train_batch_size=8", "trainer.total_training_steps=2"]
PPO = [
    *(*DATA, "data.max_prompt_length=64", "data.max_response_length=4", "reward.function=exact"),
    *("data.train_batch_size=8", "rollout.n=2", "actor.mini_batch_size=16", "trainer.total_training_steps=1"),
]
OPTIONS = {"sft": SFT, "ppo": PPO}
TRAINED = {"typed-gres": ["sft"], "whole-nodes": ["ppo"], "shared-nodes": ["sft", "ppo"]}
"""What is trained on each kind of cluster. The doctor starts Ray and a process group on all of them."""


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model and data, created once for all clusters."""
    folder = tmp_path_factory.mktemp("materials")
    make_tiny_model(folder / "model", hidden=32, layers=1)
    Workspace(folder, os.environ).ok("data", "arithmetic", "--out", "sums", "--train", "64", "--val", "8")
    return folder


@pytest.fixture(scope="module", params=VARIANTS)
def cluster(request: pytest.FixtureRequest, slurm_tree: str) -> Iterator[Cluster]:
    yield from sandbox_cluster(f"pytest-{request.param}", **VARIANTS[request.param], tree=slurm_tree)


@pytest.fixture(scope="module")
def workspace(cluster: Cluster, materials: Path) -> Workspace:
    """A folder with the detected profile."""
    folder = cluster.shared / "project"
    shutil.copytree(materials, folder)
    workspace = Workspace(folder, {**cluster.env, "OMP_NUM_THREADS": "1"}, cluster.login(folder))
    workspace.ok("site", "detect", "--yes", "--out", "site.yaml")
    return workspace


def test_slurm_takes_what_the_profile_asks_for(workspace: Workspace, cluster: Cluster) -> None:
    (workspace.folder / "train.py").touch()
    script = workspace.ok("submit", "torchrun", "--nodes", "2", "--gpus-per-node", "1", "--dry-run", "--", "train.py")
    cluster.run(["sbatch", "--test-only"], input=script, check=True)
    (asked,) = re.findall(r"^#SBATCH --(?:gres|gpus[a-z-]*)=(.*)$", script, re.MULTILINE)
    assert cluster.spec.all_shapes[0].gpus[0].type in asked
    assert ("#SBATCH --mem" in script) == cluster.spec.memory_allocated


def test_the_doctor_finds_nothing_wrong(workspace: Workspace) -> None:
    for where in ([], ["--on-nodes", "2"]):
        checks = json.loads(workspace.ok("doctor", *where, "--json", "trainer.device=cpu"))
        assert not [check for check in checks if check["level"] == "problem"]


def test_two_nodes_train(workspace: Workspace, cluster: Cluster) -> None:
    for kind in TRAINED[cluster.name.removeprefix("pytest-").rpartition("-")[0]]:
        workspace.ok("submit", kind, "--nodes", "2", "--wait", "--job-name", kind, *OPTIONS[kind])
        status = workspace.status(kind)
        assert (status["state"], status["step"]) == ("COMPLETED", status["total_steps"])
        assert (workspace.folder / "runs" / kind / "model" / "config.json").exists()
