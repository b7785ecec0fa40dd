"""Lent nodes that are preempted, stand still, or are cut off, on a real Slurm (`hpc-rl lend`)."""

import itertools
import json
import random
import time
from collections.abc import Iterator

import pytest

from hpc_rl.formats.offer import read_lent_nodes
from hpc_rl.run_dir import RunDir
from tests.conftest import sandbox_cluster
from tests.e2e.test_lending_on_slurm import GRPO, wait_for_tokens
from tests.e2e.test_ppo_on_slurm import REWARD, make_ppo_workspace, records, scores
from tests.e2e.workspace import Workspace
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.long]
STEPS, PREEMPTIONS = 50, 8
RESPONSES = 32 * 4
"""Of each step."""
PACED = """

import time
from pathlib import Path

def paced(response: str, answer: str) -> float:
    metrics, permits, deadline = Path("{metrics}"), Path("{permits}"), time.monotonic() + 600
    while metrics.exists() and metrics.read_text().count("critic/score/mean") >= len(permits.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return score(response, answer)
"""
"""The same reward, for steps that the test permits."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    partitions = {
        "train": "Nodes=node1 Default=YES PriorityTier=1 PreemptMode=OFF",
        "graceful": "Nodes=node[2-3] PriorityTier=1 PreemptMode=REQUEUE GraceTime=60",
        "abrupt": "Nodes=node[2-3] PriorityTier=1 PreemptMode=REQUEUE",
        "urgent": "Nodes=node[2-3] PriorityTier=10 PreemptMode=OFF",
    }
    settings = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    yield from sandbox_cluster(
        "lending", nodes=3, cpus=2, memory_mb=6000, partitions=partitions, settings=settings, slurmd_timeout_s=300
    )


@pytest.fixture(scope="module")
def workspace(cluster: Cluster) -> Workspace:
    return make_ppo_workspace(cluster)


def log_of(workspace: Workspace, run: str) -> str:
    return workspace.ok("logs", run)


def wait_for_words(workspace: Workspace, run: str, words: str, since: int = 0) -> int:
    """Wait until the log of a run has these words after this place; return its end."""
    workspace.wait_until(lambda: words in log_of(workspace, run)[since:], words)
    return len(log_of(workspace, run))


def test_lenders_are_preempted_at_random_moments(workspace: Workspace, cluster: Cluster) -> None:
    permits = workspace.folder / "permits"
    permits.touch()
    paced = PACED.format(permits=permits, metrics=workspace.folder / "runs/guest/metrics.jsonl")
    (workspace.folder / "paced.py").write_text(REWARD + paced)
    options = [*GRPO, f"trainer.total_training_steps={STEPS}", "trainer.export=true", "reward.timeout_s=600"]
    options.append("rollout.max_num_seqs=1")  # so that all numbers are equal, however the engines share the responses
    guest = ["rollout.engines=lent", "reward.function=paced.py:paced"]
    workspace.ok("submit", "ppo", "--job-name", "guest", *options, *guest)
    for partition in ("graceful", "abrupt"):
        workspace.ok("lend", "guest", "--partition", partition, "--mem", "3G")

    def permit(steps: int) -> None:
        with permits.open("a") as file:
            file.write("x" * steps)

    def has_taken_its_steps() -> bool:
        metrics = workspace.folder / "runs/guest/metrics.jsonl"
        return metrics.exists() and len(scores(workspace, "guest")) >= len(permits.read_text())

    chance = random.Random(0)
    urgent = ["sbatch", "--parsable", "--partition=urgent", "--exclusive", "--mem=1G", "--output=/dev/null"]
    for _ in range(PREEMPTIONS):
        permit(STEPS // PREEMPTIONS)
        until = time.monotonic() + chance.uniform(0, 2)
        workspace.wait_until(lambda until=until: time.monotonic() > until, "the moment of a preemption")
        node = f"node{chance.choice((2, 3))}"
        job = cluster.run([*urgent, f"--nodelist={node}", "--wrap=true"], cwd=workspace.folder, check=True)
        cluster.wait_job(job.stdout.strip())
        workspace.wait_until(has_taken_its_steps, "the permitted steps")
    permit(STEPS)
    for run in ("guest", "guest-lend-1", "guest-lend-2"):
        workspace.wait_until(lambda run=run: workspace.status(run)["state"] == "COMPLETED", f"the end of {run}")
    assert " has ended: " in log_of(workspace, "guest") and workspace.status("guest")["attempt"] == 1
    workspace.ok("submit", "ppo", "--job-name", "whole", *options, "--wait")
    found = scores(workspace, "guest")
    assert len(found) == STEPS and found == scores(workspace, "whole")
    exported = [(workspace.folder / f"runs/{run}/model/model.safetensors").read_bytes() for run in ("guest", "whole")]
    assert exported[0] == exported[1]
    lengths = [one["response_length/mean"] for one in records(workspace, "guest") if "response_length/mean" in one]
    lenders = read_lent_nodes(RunDir(workspace.folder / "runs/guest").attempts()[-1])
    assert sum(lender.tokens for lender in lenders) == pytest.approx(sum(lengths) * RESPONSES)
    assert len(lenders) > 2  # some have come back


def test_a_node_where_no_engine_starts_is_released(workspace: Workspace) -> None:
    make_tiny_model(workspace.folder / "moved")
    run = [*GRPO, "model.path=moved", "trainer.total_training_steps=100000", "rollout.engines=lent"]
    workspace.ok("submit", "ppo", "--job-name", "guest3", *run)
    workspace.ok("lend", "guest3", "--partition", "abrupt", "--mem", "3G")
    wait_for_tokens(workspace, "guest3", str(workspace.status("guest3-lend-1")["job_id"]))
    workspace.ok("cancel", "guest3-lend-1")
    (workspace.folder / "moved/model.safetensors").unlink()
    workspace.ok("lend", "guest3", "--partition", "abrupt", "--mem", "3G")
    workspace.wait_until(lambda: workspace.status("guest3-lend-2")["state"] == "FAILED", "the end of the lender")
    said = "run guest3 releases node node"
    assert said in log_of(workspace, "guest3-lend-2") and workspace.status("guest3-lend-2")["exit_code"] == 2
    workspace.ok("cancel", "guest3")


def test_lenders_that_cannot_join_end_with_one_line(workspace: Workspace, cluster: Cluster) -> None:
    run = workspace.folder / "elsewhere/runs/guest4"
    options = [*GRPO, "trainer.total_training_steps=100000", "rollout.engines=lent", f"--run-dir={run}"]
    workspace.ok("submit", "ppo", *options)
    lend = ["lend", str(run), "--partition", "abrupt", "--mem", "3G", "slurm.sbatch.nodelist=node2"]
    workspace.wait_until(lambda: bool(list(run.glob("attempt-1/offer.json"))), "the offer")
    offer = run / "attempt-1/offer.json"
    offered = json.loads(offer.read_text())
    number = 0

    def ends_with(words: str) -> None:
        nonlocal number
        number += 1
        workspace.ok(*lend)
        name = f"guest4-lend-{number}"
        workspace.wait_until(lambda: workspace.status(name)["state"] == "FAILED", f"the end of lender {number}")
        assert words in log_of(workspace, name)

    offer.write_text(json.dumps({**offered, "versions": {**offered["versions"], "ray": "1.0"}}))
    ends_with("1.0 in the run")
    offer.write_text(json.dumps({**offered, "gcs_address": "203.0.113.9:6379"}))  # leads to nowhere (RFC 5737)
    ends_with("does not reach the first node of run guest4 (203.0.113.9:6379)")
    offer.write_text(json.dumps(offered))
    token = run / "attempt-1/.ray-token"
    kept = token.read_text()
    token.write_text("0" * len(kept))
    ends_with(f"its token {token} has been replaced since the run began")
    token.write_text(kept)
    cluster.exec_on("node2", ["mount", "-t", "tmpfs", "none", str(run.parents[1])], check=True)
    ends_with(f"node2 does not see the directory of run guest4, {run}")
    cluster.exec_on("node2", ["umount", str(run.parents[1])], check=True)
    workspace.ok(*lend)
    job = str(workspace.status(f"guest4-lend-{number + 1}")["job_id"])
    workspace.wait_until(
        lambda: any(one.job == job and one.tokens for one in read_lent_nodes(run / "attempt-1")), "tokens"
    )
    workspace.ok("cancel", str(run))


def test_lent_nodes_stand_still_are_cut_off_and_leave(workspace: Workspace, cluster: Cluster) -> None:
    ahead = ["rollout.staleness=1", "rollout.partial=true", "data.max_response_length=256", "rollout.lent_stall_s=20"]
    validation = ["data.val_files=sums/val.jsonl", "trainer.test_freq=2", "trainer.save_freq=5"]
    run = [*GRPO, *ahead, *validation, "trainer.total_training_steps=100000", "rollout.engines=lent"]
    workspace.ok("submit", "ppo", "--job-name", "guest2", *run)
    workspace.ok("lend", "guest2", "--count", "2", "--partition", "graceful", "--mem", "3G")
    first, second = (str(workspace.status(f"guest2-lend-{number}")["job_id"]) for number in (1, 2))
    for job in (first, second):
        wait_for_tokens(workspace, "guest2", job)
    node = str(workspace.status("guest2-lend-1")["nodes"])
    gone = f"(job {first}) has ended"

    cluster.exec_on(node, ["pkill", "-STOP", "-f", "^ray::EngineProcess"], check=True)
    said = wait_for_words(workspace, "guest2", "(rollout.lent_stall_s), and is ended")
    wait_for_tokens(workspace, "guest2", first)

    cluster.exec_on(node, ["pkill", "-STOP", "-f", "raylet|EngineProcess|lender"], check=True)
    said = wait_for_words(workspace, "guest2", gone, said)
    wait_for_tokens(workspace, "guest2", second)
    cluster.exec_on(node, ["pkill", "-CONT", "-f", "raylet|EngineProcess|lender"], check=True)
    wait_for_tokens(workspace, "guest2", first)

    cluster.cut_off(node)
    said = wait_for_words(workspace, "guest2", gone, said)
    wait_for_tokens(workspace, "guest2", second)
    cluster.cut_off(node, is_off=False)
    wait_for_tokens(workspace, "guest2", first)

    for turn in itertools.count():
        cluster.run(["scancel", "--signal=TERM", first], check=True)  # as Slurm does with a GraceTime
        said = wait_for_words(workspace, "guest2", gone, said)
        wait_for_tokens(workspace, "guest2", first)
        if "other engines continue" in log_of(workspace, "guest2"):
            break
        assert turn < 20
    step = len(scores(workspace, "guest2"))
    workspace.wait_until(lambda: len(scores(workspace, "guest2")) >= step + 4, "4 steps with a validation")

    workspace.ok("stop", "guest2")
    workspace.wait_until(lambda: workspace.status("guest2")["state"] == "STOPPED", "stopped")
    for number in (1, 2):
        lender = f"guest2-lend-{number}"
        workspace.wait_until(lambda lender=lender: workspace.status(lender)["state"] == "COMPLETED", "the end")
    found = sorted(scores(workspace, "guest2"))
    assert found == list(range(1, len(found) + 1)) and workspace.status("guest2")["attempt"] == 1
    assert not (workspace.folder / "runs/guest2/lost-nodes").exists()
    assert any("val/score" in name for record in records(workspace, "guest2") for name in record)
