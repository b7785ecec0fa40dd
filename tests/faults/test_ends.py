"""Parts of jobs on real nodes that are killed or cut off. The job ends on all nodes, and its message names the part."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.conftest import sandbox_cluster
from tests.e2e.workspace import QUICK, Workspace
from tests.faults.jobs import SMALL_PPO, left_behind, left_on, measured, steps_lost, workspace_on
from tests.faults.outcomes import Outcome
from tests.sandbox import network, state
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.sandbox, pytest.mark.faults]
Job = Literal["sft", "ppo"]
ENDLESS = ["trainer.total_training_steps=100000", "trainer.test_freq=0", "trainer.export=false"]
NOISE = r"Traceback|[Ee]rror(?!:)|SIGTERM|ChildFailed"
"""What must not be printed before the cause. srun's own lines (`srun: error: ...`) may be."""


@dataclass(frozen=True)
class Part:
    """A part of a job that is killed."""

    name: str
    job: Job
    node: str
    pattern: str
    """Regular expression of its command line."""
    message: str
    """Regular expression of the first message about it."""
    exit_code: int | None = 137


PYTHON = "^[^ ]*python[^ ]* -P -m "
ENTRIES = {"sft": f"{PYTHON}hpc_rl.node.torchrun", "ppo": f"{PYTHON}hpc_rl.node.ray_cluster.node"}
RANK = "-u -P -m hpc_rl.finetune.train"
SRUN = "^srun .*--ntasks-per-node=1"
SCRIPT = "slurm_script"
STEP = r"^slurmstepd: \[[0-9]+\.0\]"
BY_SRUN = (
    "srun, or a node entry that it started, was ended by signal 9 before the nodes of the job had agreed on its end"
)
BY_SCRIPT = "the job's script was killed before it could record how the job ended"
PARTS = [
    Part("a rank", "sft", "node2", RANK, r"rank 1 on node node2 failed with exit code 137 \("),
    Part("node.rank", "sft", "node2", f"{PYTHON}hpc_rl.node.rank", "the parent process of rank 1 on node node2"),
    Part("torchrun", "sft", "node2", f"{PYTHON}hpc_rl.node.agent", "torchrun on node node2 was killed"),
    *(Part("a node entry", job, "node2", ENTRIES[job], "the node entry on node node2 was killed") for job in ENTRIES),
    *(Part("node 0's entry", job, "node1", ENTRIES[job], "the node entry on node node1 was killed") for job in ENTRIES),
    *(Part("srun", job, "node1", SRUN, BY_SRUN) for job in ENTRIES),
    *(Part("the job script", job, "node1", SCRIPT, BY_SCRIPT, None) for job in ENTRIES),
]  # fmt: skip


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    return workspace_on(slurm_cluster, "ends")


@pytest.fixture
def patient_cluster() -> Iterator[Cluster]:
    """A cluster that takes minutes to notice a lost node, as real ones do. It cannot be used again."""
    yield from sandbox_cluster("patient", nodes=3, cpus=2, memory_mb=6000, slurmd_timeout_s=300)


def begin(workspace: Workspace, job: Job, name: str, *options: str) -> Path:
    """Start a run on two nodes, wait for its second step, and return its folder. Its options may limit its steps."""
    own = QUICK if job == "sft" else [*SMALL_PPO, "slurm.mem=4G"]
    workspace.ok("submit", job, "--nodes", "2", "--job-name", name, *own, *ENDLESS, *options)
    run = workspace.folder / "runs" / name
    metrics = run / "metrics.jsonl"
    workspace.wait_until(
        lambda: metrics.exists() and metrics.read_text().count('"timing_s/step"') >= 2, f"2 steps of {name}"
    )
    return run


def text_of(run: Path) -> str:
    return "".join(path.read_text() for path in sorted(run.glob("job-*.log")))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.job}-{part.name}".replace(" ", "-"))
def test_a_killed_part(
    workspace: Workspace, slurm_cluster: Cluster, part: Part, observed: Callable[[Outcome], None]
) -> None:
    run = begin(workspace, part.job, re.sub(r"\W+", "-", f"{part.job}-{part.name}"))
    slurm_cluster.exec_on(part.node, ["pkill", "-KILL", "-f", "--", part.pattern], check=True)
    began = time.monotonic()
    ended = {"FAILED", "CANCELLED", "NODE_FAIL"}
    workspace.wait_until(lambda: workspace.status(run.name)["state"] in ended, f"the end of {run.name}")
    seconds = time.monotonic() - began
    said = workspace.ok("explain", run.name) if part.message == BY_SCRIPT else text_of(run)
    found = re.search(f"({part.message}.*)", said)
    assert found, said
    assert part.message == BY_SCRIPT or not re.search(NOISE, said[: found.start()]), said
    status = workspace.status(run.name)
    assert status["state"] == "FAILED" and part.exit_code in (None, status["exit_code"]), said
    left, ended_with = left_behind(slurm_cluster, run), f"exit code {status['exit_code']}"
    observed(Outcome(f"SIGKILL of {part.name}", part.job, seconds, found[1], ended_with, None, left))


@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_a_node_without_slurmstepd(
    workspace: Workspace, slurm_cluster: Cluster, job: Job, observed: Callable[[Outcome], None]
) -> None:
    """The run goes on. srun waits for that node for ever, and the job script does not wait for srun."""
    run = begin(workspace, job, f"{job}-slurmstepd")
    slurm_cluster.exec_on("node2", ["pkill", "-KILL", "-f", "--", STEP], check=True)
    workspace.ok("stop", run.name)
    workspace.wait_until(lambda: workspace.status(run.name)["state"] not in ("PENDING", "RUNNING"), "the end")
    assert workspace.status(run.name)["state"] == "STOPPED", text_of(run)
    lost, left = steps_lost(measured(run)), left_behind(slurm_cluster, run)
    observed(Outcome("SIGKILL of slurmstepd", job, None, "", "went on; saved when it was asked to stop", lost, left))


@pytest.mark.parametrize("job", ["sft", "ppo"])
def test_a_node_that_is_cut_off(patient_cluster: Cluster, job: Job, observed: Callable[[Outcome], None]) -> None:
    """The run is queued again without the node, before Slurm has noticed, and resumes on the others.

    Both sides are cleaned up.
    """
    workspace, cluster = workspace_on(patient_cluster, "ends"), patient_cluster
    steps = f"trainer.total_training_steps={8 if job == 'sft' else 30}"
    run, whole = (workspace.folder / "runs" / f"{job}-{name}" for name in ("cut", "whole"))
    begin(workspace, job, whole.name, steps)
    workspace.ok("logs", "-f", whole.name)
    held = workspace.hold_at(3) if job == "sft" else []
    begin(workspace, job, run.name, "trainer.save_freq=1", steps, *held)
    _, lost = nodes_of(cluster, workspace, run)
    unplug(cluster, lost)
    began = time.monotonic()
    workspace.wait_until(lambda: "is queued again" in text_of(run), "the run to be queued again")
    seconds = time.monotonic() - began
    lines = [line.removeprefix("hpc-rl: ") for line in text_of(run).splitlines() if line.startswith("hpc-rl: ")]
    reasons = [line for line in lines if f"node {lost} is lost" in line]
    assert reasons and f"lost {lost} (1 of at most 3 times)" in text_of(run), text_of(run)
    workspace.wait_until(lambda: left_on(cluster, [lost]) == [], "the lost node to be empty")
    workspace.release(run.name)
    # Slurm starts the job again when it knows that the node is down: here at once, elsewhere after SlurmdTimeout.
    cluster.run(["scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=cut off"], check=True)
    workspace.ok("logs", "-f", run.name)
    status = workspace.status(run.name)
    assert (status["state"], status["attempt"]) == ("COMPLETED", 2), text_of(run)
    assert lost not in nodes_of(cluster, workspace, run) and status["lost_nodes"] == [lost]
    found = measured(run)
    assert dict(found) == pytest.approx(dict(measured(whole)), abs=1e-4)
    others = [node for node in cluster.nodes if node != lost]
    workspace.wait_until(lambda: left_on(cluster, others) == [], "the other nodes to be empty")
    assert not list(run.glob("attempt-*/.ray-token"))
    ended, left = "queued again without the node; resumed", "nothing"
    observed(Outcome("node cut off", job, seconds, reasons[0], ended, steps_lost(found), left, losses_equal=True))


def test_the_first_node_that_is_cut_off_and_comes_back(
    patient_cluster: Cluster, observed: Callable[[Outcome], None]
) -> None:
    """Its script takes the other node for lost, but does not end the attempt that Slurm has started."""
    workspace, cluster = workspace_on(patient_cluster, "ends"), patient_cluster
    steps = ["trainer.save_freq=1", "trainer.total_training_steps=8"]
    run = begin(workspace, "sft", "first", *steps, *workspace.hold_at("3-4"))
    workspace.wait_for_step(run.name, 3)
    first, other = nodes_of(cluster, workspace, run)
    began = time.monotonic()
    unplug(cluster, first)
    workspace.wait_until(lambda: f"lost {other} (1 of at most 3 times)" in text_of(run), "the script to ask Slurm")
    seconds = time.monotonic() - began
    # As Slurm does it by itself after SlurmdTimeout.
    cluster.run(["scontrol", "update", f"NodeName={first}", "State=DOWN", "Reason=cut off"], check=True)
    workspace.wait_for_step(run.name, 4)
    attempt_2 = workspace.status(run.name)
    assert (attempt_2["state"], attempt_2["attempt"]) == ("RUNNING", 2), text_of(run)
    plug_in(cluster, first)
    workspace.wait_until(lambda: left_on(cluster, [first]) == [], "the node that was cut off to be empty")
    workspace.release(run.name)
    workspace.ok("logs", "-f", run.name)
    status = workspace.status(run.name)
    assert (status["state"], status["attempt"]) == ("COMPLETED", 2), text_of(run)
    assert first not in nodes_of(cluster, workspace, run) and "Slurm refused" not in text_of(run)
    job = cluster.run(["scontrol", "show", "job", str(status["job_id"])], check=True).stdout
    assert "Restarts=1 " in job and "ExcNodeList=(null)" in job, job
    workspace.wait_until(lambda: left_on(cluster, cluster.nodes) == [], "all nodes to be empty")
    ended = "queued again by Slurm; resumed on other nodes"
    message, lost = f"lost {other} (1 of at most 3 times)", steps_lost(measured(run))
    observed(Outcome("first node cut off, back later", "sft", seconds, message, ended, lost, "nothing"))


def test_a_job_that_is_cancelled_while_its_first_node_is_cut_off(
    patient_cluster: Cluster, observed: Callable[[Outcome], None]
) -> None:
    """Its script waits for Slurm, and must not queue it again when the network is back."""
    workspace, cluster = workspace_on(patient_cluster, "ends"), patient_cluster
    run = begin(workspace, "sft", "cancelled", "trainer.total_training_steps=8", *workspace.hold_at(3))
    first, other = nodes_of(cluster, workspace, run)
    unplug(cluster, first)
    workspace.wait_until(lambda: f"lost {other} (1 of at most 3 times)" in text_of(run), "the script to ask Slurm")
    workspace.ok("cancel", run.name)
    plug_in(cluster, first)
    workspace.wait_until(lambda: left_on(cluster, cluster.nodes) == [], "all nodes to be empty")
    workspace.wait_until(lambda: workspace.status(run.name)["state"] not in ("RUNNING", "COMPLETING"), "the end")
    status = workspace.status(run.name)
    assert (status["state"], status["attempt"]) == ("CANCELLED", 1), text_of(run)
    job = cluster.run(["scontrol", "show", "job", str(status["job_id"])], check=True).stdout
    assert "Restarts=0 " in job, job
    ended = "CANCELLED, and not queued again"
    observed(Outcome("first node cut off, `hpc-rl cancel`, back", "sft", None, "", ended, None, "nothing"))


def unplug(cluster: Cluster, node: str) -> None:
    network.unplug(state.machines(cluster.name)["ctl"].pid, cluster.nodes.index(node) + 1, second="")


def plug_in(cluster: Cluster, node: str) -> None:
    machines = state.machines(cluster.name)
    network.plug_in(
        machines["ctl"].pid,
        machines[node].pid,
        state.read(cluster.name).subnet,
        cluster.nodes.index(node) + 1,
        second="",
    )


def nodes_of(cluster: Cluster, workspace: Workspace, run: Path) -> list[str]:
    """Return the nodes of a run's job, in Slurm's order."""
    nodes = str(workspace.status(run.name)["nodes"])
    return cluster.run(["scontrol", "show", "hostnames", nodes], check=True).stdout.split()
