"""Other people's programs under an adapter, on a real Slurm: they save and resume without a change."""

import uuid
from collections.abc import Iterator

import pytest

from tests.e2e.programs import FILES, PROGRAMS
from tests.e2e.workspace import Workspace, make_workspace
from tests.sandbox.cluster import Cluster

pytestmark = pytest.mark.sandbox
STEPS = 8


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Iterator[Workspace]:
    workspace = make_workspace(slurm_cluster.shared / f"programs-{uuid.uuid4().hex[:8]}", slurm_cluster.env)
    for name, text in {**FILES, **{f"{name}.py": text for name, text in PROGRAMS.items()}}.items():
        (workspace.folder / name).write_text(text)
    yield workspace


def submit(workspace: Workspace, program: str, run: str, *options: str) -> str:
    """Submit a program to two nodes; it holds after its third step until it is asked to save, if it is not `whole`."""
    holds = [f"slurm.env.PYTHONPATH={workspace.folder}", "slurm.env.HOLD_TRAINER=1"]
    words = ["torchrun", "--nodes", "2", "--job-name", run, "trainer.device=cpu", *holds, *options]
    done = workspace.hpc_rl(
        "submit", *words, "--", f"{program}.py", "--output_dir", f"out-{run}", "--steps", str(STEPS)
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("program", [pytest.param("trainer")])
def test_the_walltime_and_a_stop_lose_nothing(workspace: Workspace, slurm_cluster: Cluster, program: str) -> None:
    whole, run = f"{program}-whole", f"{program}-held"
    submit(workspace, program, whole)
    said = submit(workspace, program, run, "slurm.env.HOLD_AT_STEP=3,5")
    assert "saves to out-" in said
    workspace.wait_for_step(run, 3)
    job_id = str(workspace.status(run)["job_id"])
    slurm_cluster.run(["scancel", "--batch", "--signal=USR2", job_id], check=True)  # as Slurm before the walltime
    workspace.wait_for_step(run, 5)
    assert workspace.status(run)["attempt"] == 2 and workspace.status(run)["job_id"] == job_id
    workspace.ok("stop", run)
    assert workspace.hpc_rl("logs", "-f", run).returncode == 75
    status = workspace.status(run)
    assert (status["state"], status["exit_code"], status["step"]) == ("STOPPED", 75, 6)
    submit(workspace, program, run, "--wait")
    workspace.ok("logs", "-f", whole)
    assert workspace.losses(run) == workspace.losses(whole)
    assert sorted(workspace.losses(run)) == list(range(1, STEPS + 1))
