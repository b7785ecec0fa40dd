"""Lenders on a real Slurm that the run queues itself, and nodes that other jobs lend for its environments."""

from typing import Any

import pytest

from tests.e2e.test_lending_on_slurm import GRPO, lent_tokens
from tests.e2e.test_ppo_on_slurm import make_ppo_workspace, records, scores
from tests.e2e.test_tools_on_slurm import ADD, PPO, workspace_on
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.long]
LONG = "trainer.total_training_steps=100000"


def test_a_run_queues_lenders_itself_and_takes_back_those_that_wait(slurm_cluster: Cluster) -> None:
    workspace = make_ppo_workspace(slurm_cluster)
    workspace.ok("submit", "ppo", "--job-name", "host", *GRPO, LONG, "rollout.engines=lent", "--sbatch=nodelist=node1")
    order = ["lend", "host", "--auto", "2", "lend.auto_look_s=5", "--mem", "5G", "--sbatch"]

    def counts() -> tuple[int, int]:
        found = workspace.status("host")["auto_lending"]
        assert isinstance(found, dict)
        return found["waiting"], found["running"]

    assert "will queue up to 2 lender jobs" in workspace.ok(*order, "nodelist=node2")  # where only one fits
    workspace.wait_until(lambda: sum(lent_tokens(workspace, "host").values()) > 0, "tokens of a lender")
    workspace.wait_until((workspace.folder / "runs/host/metrics.jsonl").exists, "a step")
    workspace.wait_until(lambda: len(scores(workspace, "host")) >= 3 and counts() == (0, 1), "it needs no other one")
    log = workspace.ok("logs", "host")
    assert "lend --auto: queued host-lend-1, host-lend-2" in log and "removed 1 lender job from the queue" in log
    workspace.ok(*order, "begin=now+1hour")
    workspace.ok("cancel", "host-lend-1")  # the run has no engine then
    workspace.wait_until(lambda: counts() == (2, 0), "jobs that wait")
    assert "2 lender jobs in the queue, 0 running, at most 2" in workspace.ok("status", "host")
    workspace.ok("stop", "host")
    workspace.wait_until(lambda: workspace.status("host")["state"] == "STOPPED", "stopped")
    assert counts() == (0, 0), workspace.logs()
    assert [path.name for path in (workspace.folder / "runs").glob("host-*")] == ["host-lend-1"]
    assert "removed 2 lender jobs from the queue" in workspace.ok("logs", "host")


def test_environments_run_on_a_node_that_is_lent_for_them(slurm_cluster: Cluster) -> None:
    workspace = workspace_on(slurm_cluster, [ADD, "3"])
    own = ["environment.name=hpc_rl.environments.calculator:Calculator", "environment.max_turns=2"]
    sizes = ["data.max_response_length=64", "data.train_batch_size=16", "rollout.n=4", "environment.workers=2"]
    workspace.ok("submit", "ppo", "--job-name", "sums", "slurm.interface=eth0", "--mem=4G", *PPO, *own, *sizes, LONG)
    refused = workspace.hpc_rl("lend", "sums", "--role", "environments", "--gpus-per-node", "2")
    assert refused.returncode == 2 and "uses no GPUs" in refused.stderr
    workspace.ok("lend", "sums", "--role", "environments", "--gpus-per-node", "0", "--mem", "3G")

    def lent() -> dict[str, Any]:
        found = workspace.status("sums")["lent_environments"]
        assert isinstance(found, list)
        return found[0] if found else {"processes": 0, "conversations": 0}

    workspace.wait_until(lambda: lent()["conversations"] > 0, "conversations on the lent node")
    assert ": 2 environment processes, " in workspace.ok("status", "sums")
    workspace.ok("cancel", "sums-lend-1")
    workspace.wait_until(lambda: lent()["processes"] == 0, "the lent node has left")
    step = len(scores(workspace, "sums"))
    workspace.wait_until(lambda: len(scores(workspace, "sums")) >= step + 3, "3 steps without it")
    found = [record["environment/errors"] for record in records(workspace, "sums") if "environment/errors" in record]
    assert found[-1] == 0 and workspace.status("sums")["attempt"] == 1
    workspace.ok("stop", "sums")
    workspace.wait_until(lambda: workspace.status("sums")["state"] == "STOPPED", "stopped")
