"""Adapters on a real Slurm: two nodes, stopped, resumed on one node, exported in both ways; and PPO on this machine."""

from __future__ import annotations

import json
import uuid

import pytest

from tests.e2e.test_ppo_on_slurm import PPO, REWARD, scores
from tests.e2e.workspace import QUICK, Workspace, make_workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster

pytestmark = pytest.mark.sandbox
SFT = [*QUICK, "model.lora={rank: 4, target_modules: [q_proj, v_proj, down_proj]}", "optim.lr=1e-2"]
STEPS = "trainer.total_training_steps=8"


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return make_workspace(slurm_cluster.shared / f"lora-{uuid.uuid4().hex[:8]}", slurm_cluster.env)


@pytest.mark.long
def test_stopped_on_two_nodes_and_resumed_on_one(workspace: Workspace) -> None:
    workspace.ok("submit", "sft", "--nodes", "2", "--job-name", "two", *SFT, STEPS, *workspace.hold_at(3))
    workspace.wait_for_step("two", 3)
    workspace.ok("stop", "two")
    workspace.wait_until(lambda: workspace.status("two")["state"] == "STOPPED", "stopped")
    workspace.ok("submit", "sft", "--nodes", "1", "--job-name", "two", "--wait", *SFT, STEPS)
    status = workspace.status("two")
    assert (status["state"], status["step"], status["attempt"]) == ("COMPLETED", 8, 2)
    losses = workspace.losses("two")
    assert sorted(losses) == list(range(1, 9)) and losses[8] < losses[1]
    workspace.ok("submit", "sft", "--nodes", "1", "--job-name", "whole", "--wait", *SFT, STEPS)
    assert losses == pytest.approx(workspace.losses("whole"), abs=1e-4)

    workspace.ok("export", "two", "adapters", "--no-merge")
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    merged, info = AutoModelForCausalLM.from_pretrained(
        workspace.folder / "runs" / "two" / "model", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    config = json.loads((workspace.folder / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (4, ["down_proj", "q_proj", "v_proj"])
    adapters = load_file(workspace.folder / "adapters" / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(workspace.folder / "model")
    assert len(adapters) == 2 * 2 * 3
    for name, weight in base.named_parameters():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in adapters:
            weight.data += 2.0 * adapters[f"{key}.lora_B.weight"] @ adapters[f"{key}.lora_A.weight"]
        torch.testing.assert_close(merged.get_parameter(name), weight)

    wrong = workspace.hpc_rl("submit", "sft", *QUICK, "model.lora={rank: 4, target_modules: [qproj]}")
    assert wrong.returncode == 2 and "qproj matches no linear layer" in wrong.stderr
    more = [*QUICK, "model.lora.path=adapters", "optim.lr=1e-3", "trainer.total_training_steps=1"]
    workspace.ok("submit", "sft", "--nodes", "1", "--job-name", "more", "--wait", *more)
    assert workspace.losses("more")[1] < losses[1]


@pytest.mark.long
@pytest.mark.slow
def test_ppo_learns_with_adapters_and_checks_them(workspace: Workspace) -> None:
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "400", "--val", "40")
    (workspace.folder / "reward.py").write_text(REWARD)
    # The LM head is frozen, so its values have to be large enough for a probable token.
    make_tiny_model(workspace.folder / "policy", hidden=64, layers=2, initializer_range=0.1)
    lora = ["model.lora.rank=16", "actor.optim.lr=1e-2", "critic.optim.lr=1e-2", "algorithm.kl.where=reward"]
    more = ["model.path=policy", "rollout.name=hf", "trainer.total_training_steps=12"]
    workspace.ok("submit", "ppo", "--local", "--nodes", "2", "--job-name", "ppo", *PPO, *lora, *more)
    found = scores(workspace, "ppo")
    assert sorted(found) == list(range(1, 13))
    assert found[12] > found[1] + 0.1
    log = (workspace.folder / "runs" / "ppo" / "attempt-1" / "driver.log").read_text()
    assert "adapters: before the first update, the engine's probabilities equal" in log
    assert "adapters: the engine's log-probabilities moved together with the policy's (slope 1.0" in log
    assert (workspace.folder / "runs" / "ppo" / "model" / "config.json").exists()
