"""What a job does when one of its processes dies, killed or out of the memory that Slurm granted, and what it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.e2e.test_ppo_on_slurm import PPO
from tests.e2e.workspace import QUICK, Workspace
from tests.faults.jobs import left_behind, measured, steps_lost, workspace_on
from tests.faults.outcomes import Outcome
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.faults]
EATER = """
import os, pathlib, re, threading, time

def eat():
    mark = pathlib.Path(os.environ["EAT_AT"])
    while not mark.exists():
        time.sleep(0.2)
    node, pattern = mark.read_text().split(" ", 1)
    own = pathlib.Path("/proc/self/cmdline").read_bytes().replace(b"\\0", b" ").decode(errors="replace")
    held = []
    while node == os.uname().nodename and re.match(pattern, own):
        held.append(b"x" * (32 << 20))

if "EAT_AT" in os.environ:
    threading.Thread(target=eat, daemon=True).start()
"""
"""A sitecustomize.py: when the file EAT_AT appears, the process that it describes takes memory without end."""
RANK = r"^[^ ]*python[^ ]* -u -P -m hpc_rl.finetune.train"
ENDLESS = "trainer.total_training_steps=1000000"
TWO_POOLS = ["pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout"]
KILLED = "killed (signal 9) by a user or a program, or for lack of memory (though the kernel counted no such kill"
DIED = f"(log in {{logs}}) died: {KILLED}"

PPO_DEATHS = {
    "worker": ("node2", "^ray::Worker", f"rank 1 of pool global_pool on node node2 {DIED}"),
    "driver": ("node1", "^ray::TaskRunner", f"the driver (log in {{logs}}) died: {KILLED}"),
}
"""What is killed -> its node, its command line, and the message."""


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return workspace_on(slurm_cluster, "messages")


def log_of(workspace: Workspace, run: str) -> str:
    return "".join(path.read_text() for path in (workspace.folder / "runs" / run).glob("job-*.log"))


def started(workspace: Workspace, kind: str, run: str, *options: str) -> Path:
    """Submit a job on two nodes, wait for its first step, and return its run directory."""
    workspace.ok(
        "submit", kind, "--nodes", "2", "--job-name", run, *(QUICK if kind == "sft" else PPO), *options, ENDLESS
    )
    folder = workspace.folder / "runs" / run
    metrics = folder / "metrics.jsonl"
    workspace.wait_until(lambda: metrics.exists() and metrics.read_text() != "", f"the first step of {run}")
    return folder


def first_message(workspace: Workspace, cluster: Cluster, run: str, words: str) -> tuple[float, str]:
    """Wait for the message and for the job's end; return the seconds until the message came, and its line."""
    began = time.monotonic()
    workspace.wait_until(lambda: words in log_of(workspace, run), f"the message of {run}: {words}")
    seconds = time.monotonic() - began
    assert cluster.wait_job(str(workspace.status(run)["job_id"])) in ("FAILED", "OUT_OF_MEMORY")
    assert workspace.status(run)["exit_code"] == 137, log_of(workspace, run)
    found = [line for line in log_of(workspace, run).splitlines() if line.startswith("hpc-rl: ") and "died" in line]
    found += [line for line in log_of(workspace, run).splitlines() if words in line]
    assert words in found[0], found
    return seconds, found[0]


def rewards_until(workspace: Workspace, run: Path, steps: int) -> list[tuple[int, float]]:
    """Wait for a number of steps, stop the run, and return the rewards of all its steps."""
    workspace.wait_until(lambda: len(measured(run)) >= steps, f"step {steps} of {run.name}")
    workspace.ok("stop", run.name)
    workspace.wait_until(lambda: workspace.status(run.name)["state"] == "STOPPED", f"the end of {run.name}")
    return measured(run)


def kill(cluster: Cluster, nodes: Iterable[str], pattern: str) -> None:
    """Kill the processes with a command line, on whichever of the nodes they are."""
    done = [cluster.exec_on(node, ["pkill", "-KILL", "-f", "--", pattern]).returncode for node in nodes]
    assert 0 in done, done


@pytest.mark.parametrize("what", PPO_DEATHS)
def test_a_killed_process_of_ppo(
    workspace: Workspace, slurm_cluster: Cluster, observed: Callable[[Outcome], None], what: str
) -> None:
    node, pattern, message = PPO_DEATHS[what]
    run = started(workspace, "ppo", f"killed-{what}", "--mem", "4G")
    kill(slurm_cluster, [node], pattern)
    words = message.format(logs=run / "attempt-1")
    seconds, line = first_message(workspace, slurm_cluster, run.name, words)
    left = left_behind(slurm_cluster, run)
    observed(Outcome(f"SIGKILL of a {what}", "ppo", seconds, line, "exit code 137", None, left))


def test_a_killed_engine_is_replaced(
    workspace: Workspace, slurm_cluster: Cluster, observed: Callable[[Outcome], None]
) -> None:
    run = started(workspace, "ppo", "killed-engine", "--mem", "4G", *TWO_POOLS)
    kill(slurm_cluster, ["node1", "node2"], "^ray::EngineProc")
    began = time.monotonic()
    words = DIED.format(logs=run / "attempt-1")
    workspace.wait_until(lambda: words in log_of(workspace, run.name), f"the message of {run.name}: {words}")
    seconds = time.monotonic() - began
    line = next(line for line in log_of(workspace, run.name).splitlines() if words in line)
    assert "another engine starts in its place" in line
    found = rewards_until(workspace, run, len(measured(run)) + 10)
    rewards, left = dict(found), left_behind(slurm_cluster, run)

    whole = started(workspace, "ppo", "whole-engine", "--mem", "4G", *TWO_POOLS)
    assert rewards == pytest.approx(dict(rewards_until(workspace, whole, len(rewards))[: len(rewards)]), abs=1e-4)
    slurm_cluster.wait_idle()
    lost = steps_lost(found)
    observed(Outcome("SIGKILL of an engine", "ppo", seconds, line, "another engine", lost, left, losses_equal=True))


@pytest.mark.parametrize(
    ("kind", "pattern", "mem", "message"),
    [
        ("sft", RANK, "1500M", "rank 1 on node node2 failed with exit code 137 (killed for lack of memory: request"),
        ("ppo", "^ray::Worker", "3G", "died: killed for lack of memory: lower trainer.micro_tokens, or request"),
    ],
)
def test_a_rank_that_takes_more_memory_than_granted(
    workspace: Workspace,
    slurm_cluster: Cluster,
    observed: Callable[[Outcome], None],
    kind: str,
    pattern: str,
    mem: str,
    message: str,
) -> None:
    folder = workspace.folder / "eater"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(EATER)
    mark = workspace.folder / f"eat-{kind}"
    eats = [f"slurm.env.PYTHONPATH={folder}", f"slurm.env.EAT_AT={mark}"]
    run = started(workspace, kind, f"memory-{kind}", "--mem", mem, *eats)
    new = mark.with_suffix(".new")
    new.write_text(f"node2 {pattern}")
    new.rename(mark)
    seconds, line = first_message(workspace, slurm_cluster, run.name, message)
    explained = workspace.ok("explain", run.name)
    assert "Killed for lack of memory" in explained
    left, job = left_behind(slurm_cluster, run), "sft" if kind == "sft" else "ppo"
    observed(Outcome("a rank out of memory", job, seconds, line, "exit code 137", None, left))
