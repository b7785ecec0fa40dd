"""Families of this year on a real Slurm: tiny models with the structure of the real ones, trained on two nodes.

`make test` runs two of them, `make test-long` all.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_ppo_on_slurm import PPO, REWARD, records
from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.marks import long
from tests.sandbox.cluster import Cluster
from tests.small_models.published import FAMILIES, make

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]
UNPACKED = ("llama4",)
"""Families whose rows are not packed."""
KINDS = [family if family in ("qwen3.5", "gemma3") else long(family) for family in FAMILIES]
SFT = [*QUICK, "optim.lr=3e-3", "optim.lr_scheduler=constant", "optim.warmup_ratio=0"]
GRPO = [option for option in PPO if not option.startswith("data.max_prompt_length")]
GRPO += ["data.max_prompt_length=256", "algorithm=grpo", "rollout.name=hf", "rollout.calculate_log_probs=true"]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    workspace = make_workspace(slurm_cluster.shared / f"models-{uuid.uuid4().hex[:8]}", slurm_cluster.env)
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "400", "--val", "40")
    (workspace.folder / "reward.py").write_text(REWARD)
    return workspace


def model_of(workspace: Workspace, family: str) -> list[str]:
    """Return the options for the model of a family, which is made if it is new."""
    folder = workspace.folder / "models" / family
    if not folder.exists():
        make(folder, family)
    packing = ["trainer.packing=false"] if family in UNPACKED else []
    return [f"model.path={folder.relative_to(workspace.folder)}", *packing]


@pytest.mark.parametrize("family", KINDS)
def test_two_nodes_fine_tune_a_model(workspace: Workspace, family: str) -> None:
    """It is stopped after a step, and continues; the exported model is whole."""
    name = f"sft-{family}"
    command = ["submit", "sft", "--nodes", "2", "--job-name", name, *SFT, *model_of(workspace, family)]
    command += ["trainer.total_training_steps=4"]
    workspace.ok(*command, *workspace.hold_at(2))
    workspace.wait_for_step(name, 2)
    workspace.ok("stop", name)
    workspace.wait_until(lambda: workspace.status(name)["state"] == "STOPPED", "stopped")
    workspace.ok(*command, "--wait")
    status = workspace.status(name)
    assert (status["state"], status["step"], status["attempt"]) == ("COMPLETED", 4, 2)
    losses = workspace.losses(name)
    assert sorted(losses) == [1, 2, 3, 4] and losses[4] < losses[1]
    assert lacking(workspace.folder / "runs" / name / "model") == []
    assert (workspace.folder / "runs" / name / "report.html").read_text().startswith("<!doctype html>")


def lacking(folder: Path) -> list[str]:
    """Names of weights that transformers does not find in a model, or finds and does not know."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    has_images = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    auto: Any = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    found: dict[str, Any] = auto.from_pretrained(folder, output_loading_info=True)[1]
    return sorted([*found["missing_keys"], *found["unexpected_keys"]])


@pytest.mark.parametrize("family", KINDS)
def test_two_nodes_improve_a_model_by_grpo(workspace: Workspace, family: str) -> None:
    """Engine and trainer agree about the probabilities of tokens."""
    name = f"grpo-{family}"
    command = ["submit", "ppo", "--nodes", "2", "--mem", "4G", "--job-name", name, *GRPO, *model_of(workspace, family)]
    command += ["trainer.total_training_steps=2", "--wait"]
    workspace.ok(*command)
    assert workspace.status(name)["state"] == "COMPLETED"
    steps = [record for record in records(workspace, name) if "critic/score/mean" in record]
    assert len(steps) == 2
    assert all(record["training/rollout_probs_diff_max"] < 1e-5 for record in steps), json.dumps(steps)
    assert lacking(workspace.folder / "runs" / name / "model") == []
