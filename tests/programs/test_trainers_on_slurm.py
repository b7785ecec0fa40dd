"""TRL, Lightning and loops with accelerate on two nodes of a real Slurm, with CPUs."""

import subprocess
import uuid

import pytest

from tests.e2e.programs import HOLDING
from tests.e2e.workspace import Workspace, make_workspace
from tests.programs.environments import REPOSITORY, python_of
from tests.programs.programs import PROGRAMS
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.programs, pytest.mark.sandbox]
STEPS = 10
EXACT = ["trl_sft", "trl_dpo", "lightning_fit"]
"""These save after any step."""


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    python_of("trainers")
    workspace = make_workspace(slurm_cluster.shared / f"trainers-{uuid.uuid4().hex[:8]}", slurm_cluster.env)
    (workspace.folder / "holding.py").write_text(HOLDING)
    for name, text in PROGRAMS.items():
        (workspace.folder / f"{name}.py").write_text(text)
    return workspace


def submit(workspace: Workspace, program: str, run: str, *options: str, more: tuple[str, ...] = ()) -> str:
    settings = [f"slurm.python={python_of('trainers')}", f"slurm.env.PYTHONPATH={REPOSITORY}", "trainer.device=cpu"]
    words = ["submit", "torchrun", "--nodes", "2", "--job-name", run, *settings, *options]
    typed = ["python", f"{program}.py", "--output_dir", f"out-{run}", "--steps", str(STEPS), *more]
    done: subprocess.CompletedProcess[str] = workspace.hpc_rl(*words, "--", *typed)
    assert done.returncode == 0, done.stderr
    return done.stderr


def signal_walltime(workspace: Workspace, cluster: Cluster, run: str) -> None:
    """Send what Slurm sends to the batch shell before the walltime ends."""
    job_id = str(workspace.status(run)["job_id"])
    cluster.run(["scancel", "--batch", "--signal=USR2", job_id], check=True)


def are_equal_at_the_end(workspace: Workspace, run: str, whole: str) -> None:
    workspace.ok("logs", "-f", whole)
    assert workspace.losses(run) == workspace.losses(whole)
    assert sorted(workspace.losses(run)) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("program", [*EXACT, "trl_grpo"])
def test_the_walltime_and_a_stop_lose_nothing(workspace: Workspace, slurm_cluster: Cluster, program: str) -> None:
    whole, run = f"{program}-whole", f"{program}-held"
    submit(workspace, program, whole)
    said = submit(workspace, program, run, "slurm.env.HOLD_AT_STEP=3,5")
    assert "saves" in said
    workspace.wait_for_step(run, 3)
    signal_walltime(workspace, slurm_cluster, run)
    workspace.wait_for_step(run, 5)
    assert workspace.status(run)["attempt"] == 2
    workspace.ok("stop", run)
    assert workspace.hpc_rl("logs", "-f", run).returncode == 75
    status = workspace.status(run)
    assert (status["state"], status["exit_code"]) == ("STOPPED", 75)
    if program == "trl_grpo":
        assert status["step"] == 8  # generations are for four steps
    submit(workspace, program, run, "--wait")
    are_equal_at_the_end(workspace, run, whole)


def test_a_loop_with_accelerate_ends_after_its_next_checkpoint(workspace: Workspace, slurm_cluster: Cluster) -> None:
    submit(workspace, "accelerate_loop", "loop-whole")
    said = submit(workspace, "accelerate_loop", "loop", "slurm.env.HOLD_AT_STEP=3,7")
    assert "ends after the next call when it is asked to stop" in said
    workspace.wait_for_step("loop", 3)
    workspace.ok("stop", "loop")
    assert workspace.hpc_rl("logs", "-f", "loop").returncode == 75
    submit(workspace, "accelerate_loop", "loop", "--wait")
    are_equal_at_the_end(workspace, "loop", "loop-whole")


@pytest.mark.parametrize("program", [*EXACT, "accelerate_loop"])
def test_a_lost_node_costs_the_steps_since_the_last_checkpoint(
    workspace: Workspace, slurm_cluster: Cluster, program: str
) -> None:
    whole, run, every = f"{program}-kept", f"{program}-lost", ("--save_every", "2")
    submit(workspace, program, whole, more=every)
    submit(workspace, program, run, "slurm.env.HOLD_AT_STEP=6", "slurm.requeue=true", more=every)
    workspace.wait_for_step(run, 6)
    saved = workspace.folder / "runs" / run / "saved.jsonl"
    workspace.wait_until(lambda: '"step": 4' in saved.read_text(), "the checkpoint of step 4")
    job_id = str(workspace.status(run)["job_id"])
    slurm_cluster.run(["scontrol", "requeue", job_id], check=True)  # as Slurm does for a lost node, or a preemption
    workspace.wait_until(lambda: workspace.status(run)["attempt"] == 2, "a second attempt")
    workspace.ok("stop", run)
    workspace.hpc_rl("logs", "-f", run)
    submit(workspace, program, run, "--wait", more=every)
    are_equal_at_the_end(workspace, run, whole)
