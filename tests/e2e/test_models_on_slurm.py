"""Families of this year on a real Slurm: tiny models with their real structure, trained by the real commands on two nodes.

`make test` runs two of them, `make test-long` all.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from tests.e2e.test_ppo_on_slurm import PPO, REWARD, scores
from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.marks import long
from tests.models_table.configs import FAMILIES, make
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]
SHORT = ("qwen3.5", "gemma3")
KINDS = [family if family in SHORT else long(family) for family in FAMILIES]
SFT = [*QUICK, "optim.lr=3e-3", "optim.lr_scheduler=constant", "optim.warmup_ratio=0"]
GRPO = [*PPO, "algorithm=grpo", "rollout.name=hf", "rollout.calculate_log_probs=true", "trainer.total_training_steps=2"]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    workspace = make_workspace(slurm_cluster.shared / f"models-{uuid.uuid4().hex[:8]}", slurm_cluster.env)
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "400", "--val", "40")
    (workspace.folder / "reward.py").write_text(REWARD)
    return workspace


def model_of(workspace: Workspace, family: str) -> str:
    """Return the option that names the model of a family, which is made if it is new."""
    folder = workspace.folder / "models" / family
    if not folder.exists():
        make(folder, family)
    return f"model.path={folder.relative_to(workspace.folder)}"


@pytest.mark.parametrize("family", KINDS)
def test_two_nodes_fine_tune_a_model_that_is_stopped_and_resumed(workspace: Workspace, family: str) -> None:
    name = f"sft-{family}"
    command = ["submit", "sft", "--nodes", "2", "--job-name", name, *SFT, model_of(workspace, family)]
    workspace.ok(*command, "trainer.total_training_steps=6", *workspace.hold_at(3))
    workspace.wait_for_step(name, 3)
    workspace.ok("stop", name)
    workspace.wait_until(lambda: workspace.status(name)["state"] == "STOPPED", "stopped")
    workspace.ok(*command, "trainer.total_training_steps=6", "--wait")
    status = workspace.status(name)
    assert (status["state"], status["step"], status["attempt"]) == ("COMPLETED", 6, 2)
    losses = workspace.losses(name)
    assert sorted(losses) == list(range(1, 7)) and losses[6] < losses[1]


def settings_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("family", KINDS)
def test_two_nodes_improve_a_model_by_grpo(workspace: Workspace, family: str) -> None:
    name = f"grpo-{family}"
    workspace.ok(
        "submit", "ppo", "--nodes", "2", "--mem", "4G", "--job-name", name, *GRPO, model_of(workspace, family), "--wait"
    )
    assert workspace.status(name)["state"] == "COMPLETED"
    assert sorted(scores(workspace, name)) == [1, 2]
