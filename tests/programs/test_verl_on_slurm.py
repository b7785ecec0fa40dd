"""verl's SFT trainer on two nodes of a real Slurm, with CPUs."""

import subprocess
import uuid
from pathlib import Path

import pytest

from tests.e2e.workspace import Workspace, make_workspace
from tests.programs.environments import REPOSITORY, python_of
from tests.sandbox.cluster import Cluster

pytestmark = [pytest.mark.programs, pytest.mark.sandbox]
BESIDE = Path(__file__).parent / "beside_verl"
STEPS = 8
TRAINER = (
    *(
        "-m",
        "verl.trainer.sft_trainer",
        "data.train_files=chats.parquet",
        "data.train_batch_size=8",
        "data.max_length=64",
    ),
    *(
        "data.micro_batch_size_per_gpu=4",
        "data.num_workers=0",
        "data.max_token_len_per_gpu=256",
        "data.pad_mode=no_padding",
    ),
    *("engine.strategy=fsdp2", "model.path=model", "+model.override_config.attn_implementation=sdpa"),
    *("model.enable_gradient_checkpointing=False", "model.use_remove_padding=False", "trainer.logger=[console]"),
    *("trainer.device=cpu", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", "optim.lr=1e-3"),
)


@pytest.fixture(scope="module")
def workspace(slurm_cluster: Cluster) -> Workspace:
    workspace = make_workspace(slurm_cluster.shared / f"verl-{uuid.uuid4().hex[:8]}", slurm_cluster.env)
    subprocess.run(
        [python_of("verl"), str(BESIDE / "data.py"), str(workspace.folder / "model"), str(workspace.folder)],
        check=True,
        timeout=600,
    )
    return workspace


def submit(workspace: Workspace, run: str, *options: str, nodes: int = 2) -> subprocess.CompletedProcess[str]:
    environ = {
        "PYTHONPATH": f"{BESIDE}:{REPOSITORY}",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpus",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
    }
    settings = [f"slurm.python={python_of('verl')}", *(f"slurm.env.{name}={value}" for name, value in environ.items())]
    words = ["submit", "torchrun", "--nodes", str(nodes), "--job-name", run, "trainer.device=cpu", *settings, *options]
    return workspace.hpc_rl(*words, "--", *TRAINER)


def signal_walltime(workspace: Workspace, cluster: Cluster, run: str) -> None:
    """Send what Slurm sends to the batch shell before the walltime ends."""
    job_id = str(workspace.status(run)["job_id"])
    cluster.run(["scancel", "--batch", "--signal=USR2", job_id], check=True)


def test_the_walltime_and_a_stop_lose_nothing(workspace: Workspace, slurm_cluster: Cluster) -> None:
    whole, held = (
        submit(workspace, run, *options) for run, options in (("whole", ()), ("held", ("slurm.env.HOLD_AT_STEP=2,4",)))
    )
    assert whole.returncode == held.returncode == 0, whole.stderr + held.stderr
    assert "verl's SFT trainer: saves before the walltime ends" in held.stderr
    workspace.wait_for_step("held", 2)
    signal_walltime(workspace, slurm_cluster, "held")
    workspace.wait_for_step("held", 4)
    assert workspace.status("held")["attempt"] == 2
    workspace.ok("stop", "held")
    assert workspace.hpc_rl("logs", "-f", "held").returncode == 75
    status = workspace.status("held")
    assert (status["state"], status["exit_code"], status["step"]) == ("STOPPED", 75, 5)
    refused = submit(workspace, "held", nodes=1)
    assert (
        refused.returncode == 2
        and "was written by 2 GPUs, and FSDP of verl resumes it on the same number" in refused.stderr
    )
    assert submit(workspace, "held", "--wait").returncode == 0
    workspace.ok("logs", "-f", "whole")
    losses = workspace.losses("whole")
    assert sorted(losses) == list(range(1, STEPS + 1)) and losses[STEPS] < losses[1]
    assert workspace.losses("held") == losses
    again = submit(workspace, "held", "--wait")
    assert again.returncode == 0 and "step 8 of 8 is saved already" in workspace.ok("logs", "held")
    assert sorted(path.name for path in (workspace.folder / "runs/held/checkpoints").glob("global_step_*")) == [
        f"global_step_{step}" for step in (3, 5, 8)
    ]


def test_without_the_adapter_the_request_is_not_seen(workspace: Workspace, slurm_cluster: Cluster) -> None:
    options = ("slurm.adapter=none", "slurm.env.HOLD_AT_STEP=2", "slurm.requeue=false")
    assert submit(workspace, "none", *options).returncode == 0
    log = workspace.folder / "runs/none/attempt-1/node0-rank0.log"
    workspace.wait_until(lambda: log.exists() and "step:2 - " in log.read_text(), "step 2")
    signal_walltime(workspace, slurm_cluster, "none")
    assert workspace.hpc_rl("logs", "-f", "none").returncode == 0  # it has trained on to its end
    assert "step:8 - " in log.read_text() and not (workspace.folder / "runs/none/metrics.jsonl").exists()
